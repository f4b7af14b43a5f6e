"""SHA-256 sums of a directory's files, in the format of `sha256sum`."""

import hashlib
import os
import re
from collections.abc import Iterable
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

    def write() -> None:
        files = sorted(file for file in path.rglob("*") if file.is_file())
        lines = [
            f"{digest}  {file.relative_to(path).as_posix()}\n"
            for file, digest in zip(files, _sums(files), strict=True)
        ]
        (path / CHECKSUMS).write_text("".join(lines), encoding="utf-8")

    distributed.from_first(write)


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
        share = dict(sorted(read_sums(path / CHECKSUMS).items())[number::count])
        sums = _sums(path / name for name in share)
        damaged = [name for name, actual in zip(share, sums, strict=True) if share[name] != actual]
        problem = ""
        if damaged:
            problem = (
                f"{path / damaged[0]} is damaged: it is not the file that {CHECKSUMS} lists. Copy "
                f"or convert the directory again; if the change is yours, delete {CHECKSUMS}."
            )
    except OSError as error:
        problem = f"{path} cannot be read: {error}."
    except ValueError as error:
        problem = f"{path / CHECKSUMS} is damaged: {error}. Copy the directory again."
    if problems := [each for each in distributed.gather(problem) if each]:
        raise CheckpointError(problems[0])


def _sums(files: Iterable[Path]) -> list[str]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(sum_of, files))


def read_sums(file: Path) -> dict[str, str]:
    """The sums that a file lists, by the files' names.

    Raises:
      ValueError: a line is not in the format of `sha256sum`.
      OSError: it cannot be read.
    """
    if file.stat().st_size > _MAX_BYTES:
        raise ValueError(f"it is larger than {_MAX_BYTES} bytes")
    sums: dict[str, str] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        match = _LINE.fullmatch(line)
        name = PurePosixPath(match[2]) if match else None
        if match is None or name is None or name.is_absolute() or ".." in name.parts:
            raise ValueError(f"line {number} is {line[:80]!r}")
        sums[match[2]] = match[1]
    return sums


def sum_of(file: Path) -> str:
    """A file's SHA-256 in hexadecimal digits."""
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()
