"""Small things that every reader of checkpoint files needs."""

import json
from pathlib import Path
from typing import Any

from spec_jax.errors import CheckpointError

_LFS_POINTER = b"version https://git-lfs"


def damaged(path: Path, why: str) -> CheckpointError:
    """The error for a file that is not what its name promises."""
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            return CheckpointError(
                f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull`."
            )
    return CheckpointError(f"{path} is truncated or damaged: {why}. Download it again.")


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
