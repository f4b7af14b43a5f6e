"""How far a call is, if its caller wants to see it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from spec_jax import distributed

Bar = bool | Callable[..., Any]
"""Whether to show a bar, or what makes one: called as `tqdm` is."""


@contextlib.contextmanager
def progress_bar(wanted: Bar, total: int) -> Iterator[Callable[[], object]]:
    """A bar of so many completions on standard error, and what advances it by one.

    Only the first of several processes shows it.
    """
    if not wanted or distributed.process()[0] > 0:
        yield lambda: None
        return
    from tqdm.auto import tqdm

    make = tqdm if wanted is True else wanted
    with make(total=total, desc="Completions", dynamic_ncols=True) as bar:
        yield bar.update
