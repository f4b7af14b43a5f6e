"""What the program waits for, and how long already."""

import re
import threading
import time

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

FRAMES = 10
"""Of the spinner, a second."""
EVERY = 5.0
"""Seconds until the first line, and at least between lines, where there is no terminal."""
GROWTH = 0.25
"""Lines of long waits are this share of the whole wait apart, so that logs stay short."""


class Waiting:
    """A spinner on a terminal; elsewhere, a line now and then once it takes long.

    Args:
      console: where to show it.
    """

    def __init__(self, console: Console):
        self._console = console
        self._message, self._since = "", 0.0
        self._begin = time.monotonic()
        self._live: Live | None = None
        self._over = threading.Event()
        # Not held while the terminal changes: Live has a lock of its own.
        self._lock = threading.Lock()

    def start(self) -> None:
        """Shows it from now on."""
        if self._console.is_terminal:
            self._frames = Spinner("dots")
            self._live = Live(
                get_renderable=self._line,
                console=self._console,
                refresh_per_second=FRAMES,
                transient=True,
            )
            self._live.start()
        else:
            threading.Thread(target=self._lines, daemon=True).start()

    def update(self, message: str) -> None:
        """Says what is waited for; numbers that change do not set the clock back."""
        with self._lock:
            if _words(message) != _words(self._message):
                self._since = time.monotonic()
            self._message = message

    def stop(self) -> None:
        """Takes the spinner away; no further lines come."""
        with self._lock:
            self._over.set()
        if self._live is not None:
            self._live.stop()

    def _text(self) -> str:
        seconds = int(time.monotonic() - self._since)
        if seconds < 1:
            return self._message
        minutes, rest = divmod(seconds, 60)
        return f"{self._message} ({f'{minutes} min ' if minutes else ''}{rest} s)"

    def _line(self) -> Text:
        frame = self._frames.render(time.monotonic())
        assert isinstance(frame, Text)
        return Text.assemble(frame, " ", self._text(), no_wrap=True, overflow="ellipsis")

    def _lines(self) -> None:
        pause = EVERY
        while not self._over.wait(pause):
            with self._lock:
                if self._over.is_set():
                    return
                try:
                    self._console.print(Text(f"spec-jax: {self._text()}"), soft_wrap=True)
                except OSError:
                    return  # nobody reads it
            pause = max(EVERY, GROWTH * (time.monotonic() - self._begin))


def _words(message: str) -> str:
    return re.sub(r"\d+", "", message)
