"""Work on the rows of a large matrix in blocks that stay in a processor's cache, in threads."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
_NUMBERS = 1 << 18
"""Numbers of a block. NumPy's passes over them stay in the cache of the second level."""


def in_row_blocks(
    function: Callable[[slice], T], num_rows: int, width: int, multiple: int = 1
) -> list[T]:
    """The results for consecutive blocks of rows, in order. NumPy lets threads run side by side.

    Args:
      function: takes a block's rows.
      num_rows: rows of the matrix.
      width: numbers of a row.
      multiple: of rows that each block but the last holds.
    """
    size = max(1, _NUMBERS // max(1, width * multiple)) * multiple
    blocks = [slice(begin, begin + size) for begin in range(0, num_rows, size)]
    if len(blocks) < 2:
        return [function(each) for each in blocks]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(function, blocks))
