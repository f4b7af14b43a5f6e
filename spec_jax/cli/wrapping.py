"""Breaks lines between words where a terminal would break them anywhere."""

import re
from collections.abc import Callable

from rich.cells import cell_len

TAB = 8
_PIECES = re.compile(r"\n|\t| +|[^\n\t ]+")


class Wrapper:
    """Text that comes in pieces, which may end within a word.

    What is there of a word is shown at once. If it passes the edge later, it is taken back and
    begins the next line.

    Args:
      columns: tells how many columns there are; 0 if nobody knows.
    """

    def __init__(self, columns: Callable[[], int]):
        self._columns = columns
        self._column = 0
        self._word = ""
        """What stands of the unfinished word on the line of the cursor."""

    def feed(self, text: str) -> str:
        """What to write to the terminal for some more text."""
        # Never into the last column: terminals differ in where the cursor is then.
        edge = self._columns() - 1
        return "".join(self._piece(piece, edge) for piece in _PIECES.findall(text))

    def _piece(self, piece: str, edge: int) -> str:
        if piece == "\n":
            self._column, self._word = 0, ""
            return piece
        if piece[0] not in "\t ":
            return "".join(self._part(part, edge) for part in _parts(piece))
        self._word = ""
        width = TAB - self._column % TAB if piece == "\t" else len(piece)
        if 1 <= edge < self._column + width:
            self._column = edge  # spaces at the edge are where the line breaks
            return ""
        self._column += width
        return piece

    def _part(self, part: str, edge: int) -> str:
        """A part of a word that must not be broken, or a wide character, which may stand apart."""
        width = cell_len(part)
        if edge < 1 or self._column + width <= edge:
            self._column += width
            self._word = "" if _is_wide(part) else self._word + part
            return part
        known = cell_len(self._word)
        if self._column > known and known + width <= edge:
            back = f"\x1b[{known}D\x1b[K" if known else ""
            self._column, self._word = known + width, self._word + part
            return f"{back}\n{self._word}"
        if len(part) == 1:
            self._column, self._word = width, part
            return f"\n{part}"
        return "".join(self._part(each, edge) for each in part)  # longer than a line


def _is_wide(part: str) -> bool:
    return len(part) == 1 and cell_len(part) == 2


def _parts(word: str) -> list[str]:
    """The word, cut around wide characters, such as those of Chinese."""
    if word.isascii():
        return [word]
    parts = [""]
    for each in word:
        if _is_wide(each) or _is_wide(parts[-1][:1]):
            parts.append(each)
        else:
            parts[-1] += each
    return [part for part in parts if part]
