"""Breaks lines between words where a terminal would break them anywhere."""

from collections.abc import Callable

from rich.cells import cell_len

TAB = 8


class Wrapper:
    """Text that comes in pieces, which may end within a word.

    The beginning of a word is shown at once. If the word passes the edge later, it is taken back
    and begins the next line. `columns` tells how many columns there are, 0 if that is unclear.
    """

    def __init__(self, columns: Callable[[], int]):
        self._columns = columns
        self._column = 0
        self._word = ""
        """The part of the unfinished word that stands on the line of the cursor."""

    def feed(self, text: str) -> str:
        """What to write to the terminal for more text."""
        # Never into the last column: terminals differ in where the cursor is then.
        edge = self._columns() - 1
        return text if edge < 1 else "".join(self._character(each, edge) for each in text)

    def _character(self, each: str, edge: int) -> str:
        width = TAB - self._column % TAB if each == "\t" else cell_len(each)
        is_space, fits = each in "\t ", self._column + width <= edge
        if each == "\n" or is_space:
            self._word = ""
            self._column = 0 if each == "\n" else min(edge, self._column + width)
            return each if each == "\n" or fits else ""  # the line breaks at spaces at the edge
        word = "" if width == 2 else self._word  # wide characters, as in Chinese, may stand apart
        begun = cell_len(word)
        if fits:
            self._column, self._word = self._column + width, word + each if width < 2 else ""
            return each
        if not self._column > begun or begun + width > edge:
            word, begun = "", 0  # longer than a line
        self._column, self._word = begun + width, word + each if width < 2 else ""
        back = f"\x1b[{begun}D\x1b[K" if begun else ""
        return f"{back}\n{word}{each}"
