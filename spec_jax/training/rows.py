"""Rows of distillation data, and the files that hold them."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from spec_jax.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Rows:
    """Texts, and what the target knew at each of their tokens.

    Its distribution after a token follows from its state there; that takes a fraction of the room
    that its probabilities would.

    Attributes:
      tokens: token ids, left-aligned.
      begins: the first token of each row that was not given: the first that is evaluated.
      lengths: tokens of each row.
      states: bfloat16; hidden states of the target's last layer at each token but the last.
      normalisers: log of the sum of the exponentials of the logits that follow from `states`.
    """

    tokens: Int[np.ndarray, "rows length"]
    begins: Int[np.ndarray, " rows"]
    lengths: Int[np.ndarray, " rows"]
    states: Float[np.ndarray, "rows length embed"]
    normalisers: Float[np.ndarray, "rows length"]

    def __len__(self) -> int:
        return len(self.tokens)


def empty_rows(count: int, length: int, embed_size: int) -> Rows:
    """Empty rows with the shapes of real ones."""
    return Rows(
        tokens=np.zeros((count, length), np.int32),
        begins=np.zeros((count,), np.int32),
        lengths=np.zeros((count,), np.int32),
        states=np.zeros((count, length, embed_size), ml_dtypes.bfloat16),
        normalisers=np.zeros((count, length), np.float32),
    )


def bytes_per_token(embed_size: int) -> int:
    """Bytes on disk for each token of a row."""
    return 2 * embed_size + 8


def write_rows(path: Path, rows: Rows) -> None:
    """Writes a file whole or not at all.

    Raises:
      OSError: for example, the disk is full; no partial file is left behind.
    """
    part = path.with_suffix(".part")
    try:
        save_file(dataclasses.asdict(rows), part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except (OSError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise
        raise OSError(f"{path} cannot be written: {error}") from error


class RowFiles:
    """The rows of several files as one collection.

    Raises:
      CheckpointError: a file is damaged.
    """

    def __init__(self, paths: Sequence[Path]):
        self.paths = list(paths)
        try:
            sizes = [self._read(path, "lengths").size for path in self.paths]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"the training data is damaged ({error}); delete the file it names, and the same "
                "command makes it again."
            ) from error
        self._ends = np.cumsum(sizes)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def _read(self, path: Path, name: str) -> np.ndarray:
        with safe_open(path, framework="numpy") as file:
            return file.get_tensor(name)

    def column(self, name: str) -> np.ndarray:
        """One field of all rows."""
        return np.concatenate([self._read(path, name) for path in self.paths])

    def take(self, numbers: Sequence[int] | np.ndarray) -> Rows:
        """Some of the rows, read from their files."""
        fields = [field.name for field in dataclasses.fields(Rows)]
        columns: dict[str, list[np.ndarray]] = {name: [] for name in fields}
        for number in numbers:
            which = int(np.searchsorted(self._ends, number, side="right"))
            at = int(number) - (int(self._ends[which - 1]) if which else 0)
            with safe_open(self.paths[which], framework="numpy") as file:
                for name in fields:
                    columns[name].append(file.get_slice(name)[at : at + 1])
        joined = {name: np.concatenate(parts) for name, parts in columns.items()}
        joined["states"] = joined["states"].view(ml_dtypes.bfloat16)
        return Rows(**joined)
