"""Reads GGUF files with the `gguf` package: metadata at once, tensors one by one."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize

from spec_jax.checkpoints.files import damaged
from spec_jax.errors import CheckpointError


class GgufFile:
    """A GGUF file's metadata and tensors.

    Attributes:
      path: the file.
      metadata: every key of the header; arrays are lists.
      shapes: shape of every tensor; matrices are [out, in].

    Raises:
      CheckpointError: the file is truncated, damaged, or of a kind that `gguf` does not read.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            reader = GGUFReader(path)
            self.metadata: dict[str, Any] = {
                name: field.contents() for name, field in reader.fields.items()
            }
        # What a file cut short or overwritten makes the reader stumble over.
        except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
            raise damaged(path, f"it does not read as GGUF ({error})") from None
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.shapes = {
            name: tuple(int(size) for size in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
        }

    def read(self, name: str) -> np.ndarray:
        """One tensor, dequantized to float32 (a view of the file if it is stored so).

        Raises:
          CheckpointError: its quantization cannot be undone.
        """
        tensor = self._tensors[name]
        try:
            return dequantize(tensor.data, tensor.tensor_type).reshape(self.shapes[name])
        except NotImplementedError:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is of type {tensor.tensor_type.name}, which cannot "
                "be dequantized; use a file of type F16, BF16, Q8_0 or Q4_K."
            ) from None
