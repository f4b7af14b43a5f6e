"""What the user sees: the model's text on standard output, everything else on standard error."""

import io
import json
import os
import sys
import time
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from spec_jax.cli.interrupts import held_back
from spec_jax.cli.waiting import Waiting
from spec_jax.cli.wrapping import Wrapper

LOG_SECONDS = 30.0
"""Between lines of a log, where there is no terminal."""
REPORT_WIDTH = 100
"""Columns of a report where there is no terminal to fit."""

# A model may write anything, and a terminal obeys control characters. Except for tab and line feed
# they are replaced by visible characters.
_VISIBLE: dict[int, str] = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"},
    0x7F: "\u2421",
    **{code: f"\\x{code:02x}" for code in range(0x80, 0xA0)},
}


def visible(text: str) -> str:
    """The text with control characters made visible, for example ESC as U+241B."""
    return text.translate(_VISIBLE)


class _Console(Console):
    """A console whose closed pipe is an error like any other; rich's own exits with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Screen:
    """Writes results, progress and statistics, and knows where the cursor is.

    Use it as a context manager: it leaves the terminal as it was.

    Args:
      json_lines: results are JSON, which is UTF-8 whatever the locale.
    """

    def __init__(self, *, json_lines: bool = False):
        self._out: TextIO = sys.stdout
        self.is_terminal = self._out.isatty()
        if isinstance(self._out, io.TextIOWrapper):
            encoding = "utf-8" if json_lines else None
            self._out.reconfigure(encoding=encoding, errors="backslashreplace")
        self._errors = _Console(stderr=True, highlight=False)
        self._waiting: Waiting | None = None
        self._wrapper = Wrapper(self._columns)
        self.remark = ""
        """Added to what the program waits for."""
        self._bar: Progress | None = None
        self._in_line = False
        self._logged = 0.0

    def __enter__(self) -> "Screen":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with held_back():
            self.settle()
            if self.is_terminal:
                self.end_line()

    def silence(self) -> None:
        """Shows nothing from now on: only one of several processes prints."""
        self.settle()
        self._out = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the end)
        self._errors = _Console(file=self._out)
        self.is_terminal = False

    def claim_output(self) -> None:
        """Keeps standard output for results: libraries beneath JAX write there too (gloo does)."""
        if not isinstance(self._out, io.TextIOWrapper):
            return  # a test has replaced it
        self._out.flush()
        mine = os.fdopen(os.dup(self._out.fileno()), "wb")
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self._out.fileno())
        self._out = io.TextIOWrapper(mine, encoding=self._out.encoding, errors="backslashreplace")
        sys.stdout = self._out

    @property
    def terminal(self) -> TextIO | None:
        """The terminal, or None if neither the text nor the rest goes to one."""
        if self.is_terminal:
            return self._out
        return sys.stderr if self._errors.is_terminal else None

    @property
    def shows_progress(self) -> bool:
        """Whether there is a terminal to show progress on."""
        return self._errors.is_terminal

    def progress(self, message: str) -> None:
        """Shows what the program waits for, if no line of text is unfinished on the terminal."""
        if self._in_line and self.is_terminal:
            return
        starts = self._waiting is None
        waiting = self._waiting or Waiting(self._errors)
        waiting.update(visible(message + self.remark))
        if starts:
            with held_back():
                self._waiting = waiting
                waiting.start()

    def bar(self, done: int, total: int, message: str) -> None:
        """Shows how much of something is done, on a terminal."""
        if not self._errors.is_terminal:
            return
        if self._bar is None:
            self.settle()
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            with held_back():
                self._bar = Progress(*columns, console=self._errors, transient=True)
                self._bar.add_task("")
                self._bar.start()
        task = self._bar.task_ids[0]
        self._bar.update(task, completed=done, total=total, description=escape(visible(message)))

    def log(self, text: str, *, now: bool) -> None:
        """Writes a line where there is no terminal; unless `now`, one in half a minute."""
        if self.shows_progress:
            return
        if now or time.monotonic() - self._logged > LOG_SECONDS:
            self._logged = time.monotonic()
            self.note(text)

    def settle(self) -> None:
        """Takes the progress away."""
        waiting, bar, self._waiting, self._bar = self._waiting, self._bar, None, None
        for shown in (waiting, bar):
            if shown is not None:
                with held_back():
                    shown.stop()

    def write(self, text: str) -> None:
        """Writes text of the model, literally; a terminal gets whole words."""
        if not text:
            return
        self.settle()
        self._out.write(self._wrapper.feed(visible(text)) if self.is_terminal else text)
        self._out.flush()
        self._in_line = not text.endswith("\n")

    def end_line(self) -> None:
        """Ends the line of text, if one was begun."""
        if self._in_line:
            self.write("\n")

    def heading(self, text: str) -> None:
        """Writes a line above a result."""
        self.settle()
        console = _Console(file=self._out, highlight=False)
        console.print(Text(visible(text), style="bold"), soft_wrap=not self.is_terminal)

    def show(self, *lines: RenderableType) -> None:
        """Writes a report as the result; text in it is literal."""
        self.settle()
        width = None if self.is_terminal else REPORT_WIDTH
        console = _Console(file=self._out, highlight=False, width=width)
        for line in lines:
            console.print(Text(visible(line)) if isinstance(line, str) else line)

    def record(self, value: dict[str, Any]) -> None:
        """Writes one JSON line."""
        self.settle()
        self._out.write(json.dumps(value, ensure_ascii=False) + "\n")
        self._out.flush()

    def note(self, text: str | RenderableType) -> None:
        """Writes a remark, or a table, on standard error."""
        self.settle()
        if self.is_terminal and self._errors.is_terminal:
            self.end_line()
        if isinstance(text, str):
            text = Text(visible(text), style="dim")
        whole_lines = isinstance(text, Text) and not self._errors.is_terminal
        self._errors.print(text, soft_wrap=whole_lines)

    def error(self, message: str) -> None:
        """Reports what went wrong without ending the program."""
        self.note(Text(f"spec-jax: error: {visible(message)}"))

    def _columns(self) -> int:
        """How wide the terminal is now; 0 if it does not say or cannot take words back."""
        if self._errors.is_dumb_terminal:
            return 0
        try:
            return os.get_terminal_size(self._out.fileno()).columns
        except (OSError, ValueError):
            return 0
