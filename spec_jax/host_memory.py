"""Memory that a process has freed and glibc keeps; other C libraries are left as they are."""

import contextlib
import ctypes
from collections.abc import Iterator

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LEAST_BLOCK = 1 << 17
_MOST_BLOCK = 1 << 25


def give_back() -> None:
    """Gives the system what was freed; glibc would keep it, in pieces of little use."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def large_blocks_given_back() -> Iterator[None]:
    """Meanwhile the system gets blocks from 128 KiB on back as soon as they are freed.

    glibc begins so too, but whenever it frees such a block it keeps all that are as small from
    then on, up to 32 MiB: what many threads read and free would stay with each of them. Afterwards
    it keeps them, since a program that runs again and again wants its memory without page faults.
    """
    _set(_MMAP_THRESHOLD, _LEAST_BLOCK)
    try:
        yield
    finally:
        _set(_MMAP_THRESHOLD, _MOST_BLOCK)
        _set(_TRIM_THRESHOLD, 2 * _MOST_BLOCK)  # as glibc does
        give_back()


def _set(parameter: int, value: int) -> None:
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).mallopt(parameter, value)
