"""What the user sees: the model's text on standard output, everything else on standard error."""

import io
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from spec_jax.cli.interrupts import postponed
from spec_jax.cli.waiting import Waiting
from spec_jax.cli.wrapping import Wrapper
from spec_jax.outputs import RequestOutput

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


def minutes_left(seconds: float | None) -> str:
    """How long something still takes, if that is clear."""
    if seconds is None:
        return ""
    minutes, seconds = divmod(round(seconds), 60)
    return f", {minutes}:{seconds:02d} left"


def plain_table(
    labels: Sequence[str],
    numbers: Sequence[str],
    rows: Iterable[Sequence[RenderableType]],
    *,
    padding: int = 2,
    header: bool = True,
) -> Table:
    """A table without lines, of columns of text and then of numbers, given by their headings.

    Numbers are never broken over lines, nor is the first of several columns of text.
    """
    table = Table(box=None, pad_edge=False, padding=(0, padding, 0, 0), show_header=header)
    for place, label in enumerate(labels):
        table.add_column(label, overflow="fold", no_wrap=place < len(labels) - 1 and not place)
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


class _Console(Console):
    """A console whose closed pipe is an error like any other; rich's exits with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Screen:
    """Writes results, progress and statistics, and knows where the cursor is.

    Use it as a context manager: it leaves the terminal as it was.

    Args:
      json_lines: results are JSON, which is UTF-8 whatever the locale.
    """

    def __init__(self, *, json_lines: bool = False):
        self._json_lines = json_lines
        self._out: TextIO = sys.stdout
        self.is_terminal = self._out.isatty()
        if isinstance(self._out, io.TextIOWrapper):
            encoding = "utf-8" if json_lines else None
            self._out.reconfigure(encoding=encoding, errors="backslashreplace")
        self._errors = _Console(stderr=True, highlight=False)
        self._wrapper = Wrapper(self._columns)
        self.remark = ""
        """Added to what the program waits for."""
        self._shown: Waiting | Progress | None = None
        self._in_line = False
        self._logged = 0.0

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *error: object) -> None:
        with postponed():
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
        duplicate = os.fdopen(os.dup(self._out.fileno()), "wb")
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self._out.fileno())
        encoding = self._out.encoding
        self._out = io.TextIOWrapper(duplicate, encoding=encoding, errors="backslashreplace")
        sys.stdout = self._out

    @property
    def terminal(self) -> TextIO | None:
        """The terminal, or None if neither the text nor the rest goes to one."""
        if self.is_terminal:
            return self._out
        return sys.stderr if self._errors.is_terminal else None

    def progress(self, message: str) -> None:
        """Shows what the program waits for, if no line of text is unfinished on the terminal."""
        if self._in_line and self.is_terminal:
            return
        message = visible(message + self.remark)
        if isinstance(self._shown, Waiting):
            self._shown.update(message)
        else:
            self._start(Waiting(self._errors, message))

    def count(self, done: int, total: int, unit: str, text: str, *, now: bool = False) -> None:
        """Shows a bar; without a terminal a line of a log, with `now` even if one is recent."""
        if not self._errors.is_terminal:
            self.log(f"{done} of {total} {unit}: {text}", now=now)
            return
        if not isinstance(self._shown, Progress):
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            bar = Progress(*columns, console=self._errors, transient=True)
            bar.add_task("")
            self._start(bar)
        assert isinstance(self._shown, Progress)
        description = escape(visible(text))
        self._shown.update(
            self._shown.task_ids[0], completed=done, total=total, description=description
        )

    def log(self, text: str, *, now: bool = False) -> None:
        """Shows what happens: on a terminal as progress, else as a line, two a minute at most."""
        if self._errors.is_terminal:
            self.progress(text)
        elif now or time.monotonic() - self._logged > LOG_SECONDS:
            self._logged = time.monotonic()
            self.note(text)

    def settle(self) -> None:
        """Takes the progress away."""
        if (shown := self._shown) is not None:
            with postponed():
                self._shown = None
                shown.stop()

    def _start(self, shown: Waiting | Progress) -> None:
        self.settle()
        with postponed():
            self._shown = shown
            shown.start()

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

    def report(
        self, job: dict[str, Any], result: dict[str, Any], lines: Sequence[RenderableType]
    ) -> None:
        """Writes what a job was and its result, as one JSON line or as `lines` for people."""
        if self._json_lines:
            self.record(job | result)
        else:
            settings = (f"{name} {value}" for name, value in job.items() if value is not None)
            self.show(", ".join(settings), "", *lines)

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
        is_line = isinstance(text, Text) and not self._errors.is_terminal
        self._errors.print(text, soft_wrap=is_line)

    def error(self, message: str) -> None:
        """Reports what went wrong without ending the program."""
        self.note(Text(f"spec-jax: error: {visible(message)}"))

    def errors_of(self, outputs: Iterable[RequestOutput]) -> int:
        """Reports the errors of requests; returns the exit code."""
        errors = [output.error for output in outputs if output.error is not None]
        for error in errors:
            self.error(error)
        return 2 if errors else 0

    def _columns(self) -> int:
        """How wide the terminal is now; 0 if it does not say or cannot take words back."""
        if self._errors.is_dumb_terminal:
            return 0
        try:
            return os.get_terminal_size(self._out.fileno()).columns
        except (OSError, ValueError):
            return 0
