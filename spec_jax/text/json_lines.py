"""Files of JSON lines that grow while work is done, and survive that it is killed."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_BLOCK = 1 << 16


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Appends a line; when this returns, it is on the disk."""
    with path.open("ab") as file:
        file.write(_line(value))
        file.flush()
        os.fsync(file.fileno())


def replace_lines(path: Path, values: Iterable[dict[str, Any]]) -> None:
    """Writes a file anew; whoever reads it meanwhile, or after a kill, finds it as it was."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.writelines(map(_line, values))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


def drop_unfinished_line(path: Path, begin: bytes) -> None:
    """Removes the last line of a file if a killed process did not finish it.

    Args:
      path: the file.
      begin: how its first line begins; a file that begins otherwise is left as it is.
    """
    with path.open("r+b") as file:
        size = end = file.seek(0, os.SEEK_END)
        file.seek(0)
        if file.read(len(begin)) != begin[:size]:
            return
        while end:
            block = max(0, end - _BLOCK)
            file.seek(block)
            if (found := file.read(end - block).rfind(b"\n")) >= 0:
                end = block + found + 1
                break
            end = block
        file.truncate(end)
