"""Files that appear when they are complete."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

PARTIAL = ".partial"
"""How the names of files that are being written end."""


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A path to write to, which replaces `path` once it is on the disk, or is removed on an error.

    Whoever reads `path` meanwhile, or after this process was killed, finds the earlier file. Where
    several write it at once, the last one to end counts.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}{PARTIAL}")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """Writes a text file whole or not at all."""
    with new_file(path) as partial:
        partial.write_text(text, encoding="utf-8")
