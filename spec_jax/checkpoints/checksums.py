"""SHA-256 sums of a directory's files, in the format of `sha256sum`."""

import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from spec_jax import distributed
from spec_jax.errors import CheckpointError

CHECKSUMS = "checksums.sha256"
"""The file that lists them; `sha256sum --check` reads it too."""
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
_MAX_BYTES = 16 << 20


def write_checksums(path: Path) -> None:
    """Lists all files of a directory; the first process does, after all have written."""
    distributed.from_first(lambda: _write(path))


def verify_checksums(path: Path) -> None:
    """Compares the files that a directory lists; the processes of a run share the work.

    A directory without a list passes.

    Raises:
      CheckpointError: a file is missing or differs from what was written, or the list is damaged.
    """
    if not (path / CHECKSUMS).is_file():
        return
    number, count = distributed.process()
    try:
        listed = sorted(read_sums(path / CHECKSUMS).items())
        own = listed[number::count]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            sums = list(pool.map(lambda each: sum_of(path / each[0]), own))
        differ = [
            name for (name, listed_as), found in zip(own, sums, strict=True) if listed_as != found
        ]
        problem = ""
        if differ:
            problem = (
                f"{path / differ[0]} is damaged: it is not the file that {CHECKSUMS} lists. Copy "
                f"or convert the directory again; if the change is yours, delete {CHECKSUMS}."
            )
    except OSError as error:
        problem = f"{path} cannot be read: {error}."
    except ValueError as error:
        problem = f"{path / CHECKSUMS} is damaged: {error}. Copy the directory again."
    if found := [each for each in distributed.gather(problem) if each]:
        raise CheckpointError(found[0])


def _write(path: Path) -> None:
    files = sorted(file for file in path.rglob("*") if file.is_file())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        sums = list(pool.map(sum_of, files))
    lines = [
        f"{found}  {file.relative_to(path).as_posix()}\n"
        for file, found in zip(files, sums, strict=True)
    ]
    (path / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def read_sums(file: Path) -> dict[str, str]:
    """The sums that a file lists, by the files' names.

    Raises:
      ValueError: a line is not one of `sha256sum`.
      OSError: it cannot be read.
    """
    if file.stat().st_size > _MAX_BYTES:
        raise ValueError(f"it is larger than {_MAX_BYTES} bytes")
    found: dict[str, str] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        match = _LINE.fullmatch(line)
        name = PurePosixPath(match[2]) if match else None
        if match is None or name is None or name.is_absolute() or ".." in name.parts:
            raise ValueError(f"line {number} is {line[:80]!r}")
        found[match[2]] = match[1]
    return found


def sum_of(file: Path) -> str:
    """A file's SHA-256 in hexadecimal digits."""
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()
