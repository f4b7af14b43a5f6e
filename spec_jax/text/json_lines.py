"""Files of JSON lines that grow during a job, and survive its end at any moment."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from spec_jax.files import new_file

_BLOCK = 1 << 16


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Appends a line; when this returns, it is on the disk."""
    with path.open("ab") as file:
        file.write(_line(value))
        file.flush()
        os.fsync(file.fileno())


def replace_lines(path: Path, values: Iterable[dict[str, Any]]) -> None:
    """Writes a file anew, whole or not at all."""
    with new_file(path) as partial:
        partial.write_bytes(b"".join(map(_line, values)))


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


def drop_unfinished_line(path: Path, begin: bytes) -> None:
    """Removes the last line of a file if a killed process did not finish it.

    Args:
      path: the file.
      begin: the first bytes of its first line; a file that begins otherwise is not changed.
    """
    with path.open("r+b") as file:
        size = end = file.seek(0, os.SEEK_END)
        file.seek(0)
        if file.read(len(begin)) != begin[:size]:
            return
        while end:
            block = max(0, end - _BLOCK)
            file.seek(block)
            if (newline := file.read(end - block).rfind(b"\n")) >= 0:
                end = block + newline + 1
                break
            end = block
        file.truncate(end)
