"""Handles Ctrl-C so that it is never lost and never leaves the terminal in a broken state."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

INTERRUPTED = 130
"""Exit code of a program that SIGINT ended, as shells report it."""
AGAIN = 0.25
"""Seconds until a Ctrl-C that was not handled is raised again."""

_pending = False


@contextlib.contextmanager
def raised_until_acknowledged() -> Iterator[None]:
    """Raises KeyboardInterrupt at Ctrl-C, and again until `acknowledge` is called.

    Python drops an exception in a finalizer or in a callback of the garbage collector (JAX has
    one), and extension modules clear some exceptions; both are common while a model loads.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # ignored, as in a job in the background
        return
    report, threads = sys.unraisablehook, threading.enumerate()

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if unraisable.exc_type is not KeyboardInterrupt:
            report(unraisable)

    sys.unraisablehook = hook
    alarm = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    except Exception as error:
        if acknowledge():  # an operation that Ctrl-C interrupted may fail in any way
            raise KeyboardInterrupt from error
        raise
    finally:
        acknowledge()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGALRM, alarm)
        sys.unraisablehook = report
        # A timer that JAX had just started when interrupted would delay the exit by a minute.
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer) and thread not in threads:
                thread.cancel()


def _interrupt(number: int, frame: FrameType | None) -> None:
    # A timer of the operating system: a Python thread might need a lock that this one holds.
    global _pending
    _pending = True
    signal.setitimer(signal.ITIMER_REAL, AGAIN)
    raise KeyboardInterrupt


def acknowledge() -> bool:
    """Marks a pending Ctrl-C as handled; returns whether there was one."""
    global _pending
    was, _pending = _pending, False
    if was:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return was


@contextlib.contextmanager
def postponed() -> Iterator[None]:
    """Postpones a Ctrl-C inside the block to its end."""
    numbers: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: numbers.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if numbers:
            signal.raise_signal(signal.SIGINT)
