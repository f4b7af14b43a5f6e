"""A spinner with the elapsed time."""

import re
import threading
import time

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

FRAMES = 10
"""Frames of the spinner, a second."""
PAUSE = 5.0
"""Seconds until the first line, and at least between lines, where there is no terminal."""
GROWTH = 0.25
"""Lines of long waits are this share of the elapsed time apart, so that logs stay short."""


class Waiting:
    """A spinner on a terminal; elsewhere, a line now and then once it takes long."""

    def __init__(self, console: Console, message: str):
        self._console = console
        self._message, self._since = message, time.monotonic()
        self._spinner, self._over = Spinner("dots"), threading.Event()
        # Not held while the terminal changes: Live has a lock too.
        self._lock = threading.Lock()
        self._live = Live(
            get_renderable=self._line,
            console=console,
            refresh_per_second=FRAMES,
            transient=True,
        )

    def start(self) -> None:
        """Shows it from now on."""
        if self._console.is_terminal:
            self._live.start()
        else:
            threading.Thread(target=self._log, daemon=True).start()

    def update(self, message: str) -> None:
        """Says what is waited for; numbers that change do not reset the clock."""
        with self._lock:
            if re.sub(r"\d+", "", message) != re.sub(r"\d+", "", self._message):
                self._since = time.monotonic()
            self._message = message

    def stop(self) -> None:
        """Takes the spinner away; no further lines come."""
        with self._lock:
            self._over.set()
        self._live.stop()

    def _text(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._since), 60)
        elapsed = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
        return f"{self._message} ({elapsed})" if minutes or seconds else self._message

    def _line(self) -> Text:
        frame = self._spinner.render(time.monotonic())
        assert isinstance(frame, Text)
        return Text.assemble(frame, " ", self._text(), no_wrap=True, overflow="ellipsis")

    def _log(self) -> None:
        pause, begin = PAUSE, time.monotonic()
        while not self._over.wait(pause):
            with self._lock:
                if self._over.is_set():
                    return
                try:
                    self._console.print(Text(f"spec-jax: {self._text()}"), soft_wrap=True)
                except OSError:
                    return  # nobody reads it
            pause = max(PAUSE, GROWTH * (time.monotonic() - begin))
