"""Standard streams that are closed, that nobody reads, or that cannot be written."""

import contextlib
import errno
import os
import sys
import textwrap

from spec_jax.errors import ConfigError, printable

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


def open_closed() -> None:
    """Opens what is closed, lest a file that is opened later takes its place and is written to.

    Raises:
      ConfigError: standard output is closed, and so the result would be lost.
    """
    for stream in range(3):
        try:
            os.fstat(stream)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the least number that is free
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (until the end)
    if sys.stdout is None:
        raise ConfigError("standard output is closed; send it to a file, or to /dev/null.")


def report_error(text: str) -> None:
    """Reports an error on standard error, in one line unless a terminal would break its words."""
    text = printable(f"spec-jax: error: {text}")
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr.isatty() and (columns := os.get_terminal_size(sys.stderr.fileno()).columns):
            wrap = textwrap.TextWrapper(columns, break_long_words=False, break_on_hyphens=False)
            text = "\n".join(map(wrap.fill, text.splitlines()))
        print(text, file=sys.stderr, flush=True)


def message_of(error: Exception) -> str:
    """What an error says; the system does not say what it was that could not be written."""
    if isinstance(error, OSError) and error.errno in _FULL and not error.filename:
        return f"the output cannot be written: {error.strerror}."
    return str(error)


def discard() -> None:
    """Makes Python's own flush at exit succeed when nobody reads, or nothing can be written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
