"""Work on the rows of a large matrix in blocks that stay in a processor's cache, in threads."""

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

_NUMBERS = 1 << 20
"""Numbers of a block. NumPy's passes over them stay in the cache of the second level."""


def in_row_blocks(
    function: Callable[[slice], Sequence[np.ndarray]], num_rows: int, width: int
) -> list[np.ndarray]:
    """Arrays that a function computes for consecutive blocks of rows.

    NumPy lets threads run side by side.

    Args:
      function: takes some rows and returns these rows of each array.
      num_rows: rows of the matrix.
      width: numbers of a row.
    """
    size = max(1, _NUMBERS // max(1, width))
    blocks = [slice(begin, begin + size) for begin in range(0, num_rows, size)]
    first = function(slice(0, size))
    if len(blocks) < 2:
        return list(first)
    arrays = [np.empty((num_rows, *part.shape[1:]), part.dtype) for part in first]

    def fill(block: slice) -> None:
        for array, part in zip(arrays, function(block) if block.start else first, strict=True):
            array[block] = part

    list(_threads(os.getpid()).map(fill, blocks))
    return arrays


@functools.cache
def _threads(process: int) -> ThreadPoolExecutor:
    """A process's threads, which a fork of it does not have."""
    return ThreadPoolExecutor(os.cpu_count(), f"spec-jax-rows-of-{process}")
