"""Rows of distillation data, and the files that hold them."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from spec_jax.errors import CheckpointError
from spec_jax.files import new_file


@dataclasses.dataclass(frozen=True)
class TrainingRows:
    """Texts, and the target's hidden states at each of their tokens.

    The target's distribution after a token follows from its hidden state, which takes a fraction of
    the space of the probabilities.

    Attributes:
      tokens: token ids, left-aligned.
      begins: of each row, the first token after the prompt: the first that is evaluated.
      lengths: tokens of each row.
      states: bfloat16; hidden states of the target's last layer at each token but the last.
      normalisers: log of the sum of the exponentials of the logits that follow from `states`.
    """

    tokens: Int[np.ndarray, "rows length"]
    begins: Int[np.ndarray, " rows"]
    lengths: Int[np.ndarray, " rows"]
    states: Float[np.ndarray, "rows length embed"]
    normalisers: Float[np.ndarray, "rows length"]


def empty_rows(count: int, length: int, embed_size: int) -> TrainingRows:
    """Empty rows with the shapes of real ones."""
    return TrainingRows(
        tokens=np.zeros((count, length), np.int32),
        begins=np.zeros((count,), np.int32),
        lengths=np.zeros((count,), np.int32),
        states=np.zeros((count, length, embed_size), ml_dtypes.bfloat16),
        normalisers=np.zeros((count, length), np.float32),
    )


def bytes_per_token(embed_size: int) -> int:
    """Bytes on disk for each token of a row."""
    return 2 * embed_size + 8


def write_rows(path: Path, rows: TrainingRows) -> None:
    """Writes a file whole or not at all.

    Raises:
      OSError: for example, the disk is full.
    """
    try:
        with new_file(path) as partial:
            save_file(dataclasses.asdict(rows), partial)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error


class RowFiles:
    """The rows of several files as one collection.

    Raises:
      CheckpointError: a file is damaged.
    """

    def __init__(self, paths: Sequence[Path]):
        self.paths = list(paths)
        try:
            self._ends = np.cumsum([each.size for each in self._read("lengths")], dtype=int)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"the training data is damaged ({error}); delete the file it names, and the same "
                "command makes it again."
            ) from error

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def _read(self, name: str) -> list[np.ndarray]:
        """One field of each file."""
        fields = []
        for path in self.paths:
            with safe_open(path, framework="numpy") as file:
                fields.append(file.get_tensor(name))
        return fields

    def column(self, name: str) -> np.ndarray:
        """One field of all rows."""
        return np.concatenate(self._read(name))

    def take(self, numbers: Sequence[int] | np.ndarray) -> TrainingRows:
        """Some of the rows, read from their files."""
        names = [field.name for field in dataclasses.fields(TrainingRows)]
        columns: dict[str, list[np.ndarray]] = {name: [] for name in names}
        for number in numbers:
            which = int(np.searchsorted(self._ends, number, side="right"))
            row = int(number) - (int(self._ends[which - 1]) if which else 0)
            with safe_open(self.paths[which], framework="numpy") as file:
                for name in names:
                    columns[name].append(file.get_slice(name)[row : row + 1])
        fields = {name: np.concatenate(parts) for name, parts in columns.items()}
        fields["states"] = fields["states"].view(ml_dtypes.bfloat16)
        return TrainingRows(**fields)
