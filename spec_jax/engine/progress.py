"""An optional progress bar of a call."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from spec_jax import distributed

Bar = bool | Callable[..., Any]
"""Whether to show a bar, or a function that makes one, called like `tqdm`."""


@contextlib.contextmanager
def progress_bar(option: Bar, total: int) -> Iterator[Callable[[], object]]:
    """A bar of `total` completions on standard error; yields a function that advances it by one.

    Only the first of several processes shows it.
    """
    if not option or distributed.process()[0] > 0:
        yield lambda: None
        return
    from tqdm.auto import tqdm

    make = tqdm if option is True else option
    with make(total=total, desc="Completions", dynamic_ncols=True) as bar:
        yield bar.update
