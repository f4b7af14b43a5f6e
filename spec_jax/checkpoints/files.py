"""Small things that every reader of checkpoint files needs."""

import hashlib
import json
from pathlib import Path
from typing import Any

from spec_jax.errors import CheckpointError

_BLOCK, _BLOCKS = 4096, 256
"""Bytes of a sample of a file, and how many samples are taken of one."""
_LFS_POINTER = b"version https://git-lfs"


def damaged(path: Path, why: str) -> CheckpointError:
    """The error for a file whose contents do not match its name."""
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
    found = hashlib.sha256()
    for each in files:
        size = each.stat().st_size
        found.update(f"{each.relative_to(path)} {size} ".encode())
        with each.open("rb") as file:
            for at in range(0, size, max(_BLOCK, size // _BLOCKS)):
                file.seek(at)
                found.update(file.read(_BLOCK))
    return found.hexdigest()[:16]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
      CheckpointError: there is no such file, or it holds something else.
    """
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing. Is {path.parent} a Hugging Face model directory?"
        )
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise damaged(path, f"it is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise damaged(path, "it does not hold a JSON object")
    return value
