"""Helpers of all readers of checkpoint files."""

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spec_jax.errors import CheckpointError, SpecJaxError

# Everything that a model needs: no pickles, no code, no sub-folders with other formats.
MODEL_FILES = ("*.json", "*.safetensors", "tokenizer.*", "merges.txt", "*.jinja")
"""Patterns of the files that are fetched of a Hugging Face directory."""
_BLOCK, _BLOCKS = 4096, 256
"""Bytes of a sample of a file, and how many samples are taken of one."""
_MAX_JSON = 64 << 20
"""Bytes of the largest JSON file that is read: an index of the largest models has a few MiB."""
_LFS_POINTER = b"version https://git-lfs"


def damaged(path: Path, why: str) -> CheckpointError:
    """The error for a file whose contents do not match its name."""
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                return CheckpointError(
                    f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull`."
                )
    return CheckpointError(f"{path} is truncated or damaged: {why}. Download it again.")


def fingerprint(path: Path) -> str:
    """Identifies a model by a MiB of each of its files, sampled in evenly spaced blocks.

    Weights from another training differ nearly everywhere and are detected; files that differ in a
    few bytes may not be.

    Args:
      path: a model's file, or its directory.
    """
    files = [path]
    if path.is_dir():
        patterns = ("*.json", "*.jinja", "*.safetensors", "model.bin", "weights/**/*")
        files = sorted(file for each in patterns for file in path.glob(each) if file.is_file())
    digest = hashlib.sha256()
    for each in files:
        size = each.stat().st_size
        digest.update(f"{each.relative_to(path)} {size} ".encode())
        with each.open("rb") as file:
            for at in range(0, size, max(_BLOCK, size // _BLOCKS)):
                file.seek(at)
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns errors of the disk into one that names the path."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error


@contextlib.contextmanager
def making_sense(path: Path) -> Iterator[None]:
    """Turns the errors that senseless settings cause into one that names their file."""
    try:
        yield
    except SpecJaxError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError) as error:
        raise damaged(path, f"it makes no sense ({type(error).__name__}: {error})") from error
    except (TypeError, ValueError) as error:
        raise damaged(path, f"it makes no sense ({error})") from error


def refuse_devices(path: Path) -> None:
    """Refuses pipes, sockets and devices, which can be read without end.

    Args:
      path: a model's file or directory.

    Raises:
      CheckpointError: it is one, or has one in it.
    """
    for each in (path, *(path.iterdir() if path.is_dir() else ())):
        if each.exists() and not each.is_file() and not each.is_dir():
            raise CheckpointError(
                f"{each} is not a file but a pipe, a socket or a device; remove it."
            )


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys differ: readers disagree about which of two equal ones counts."""
    value = dict(pairs)
    if len(value) < len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"an object has two keys {key!r}")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
      CheckpointError: there is no such file, or it holds something else.
    """
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing. Is {path.parent} a Hugging Face model directory?"
        )
    if path.stat().st_size > _MAX_JSON:
        raise damaged(path, f"it has more than {_MAX_JSON} bytes")
    try:
        value = json.loads(path.read_bytes(), object_pairs_hook=_without_doubles)
    except (RecursionError, ValueError) as error:
        raise damaged(path, f"it is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise damaged(path, "it does not hold a JSON object")
    return value
