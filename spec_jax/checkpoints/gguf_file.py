"""Reads GGUF files: metadata at once, parts of tensors one by one, dequantized."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, dequantize

from spec_jax.checkpoints.files import damaged
from spec_jax.checkpoints.gguf_blocks import form_of, unpack
from spec_jax.checkpoints.gguf_header import read_header
from spec_jax.errors import CheckpointError
from spec_jax.kernels import Quantized, QuantizedForm
from spec_jax.models.family import Slices, Stored

_STORED: dict[GGMLQuantizationType, Stored] = {
    GGMLQuantizationType.F64: "float32",
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}


class GgufFile:
    """A GGUF file's metadata and tensors.

    Attributes:
      path: the file.
      metadata: every key of the header; arrays are lists.
      shapes: shape of every tensor; matrices are [out, in].

    Raises:
      CheckpointError: the file is truncated, damaged, or of an unknown version.
    """

    def __init__(self, path: Path):
        self.path = path
        self.metadata: dict[str, Any]
        try:
            self.metadata, self._tensors = read_header(path)
        except ValueError as error:
            raise damaged(path, f"it does not read as GGUF ({error})") from None
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    @property
    def stored(self) -> Stored:
        """How the largest tensor is stored."""
        largest = max(self._tensors.values(), key=lambda tensor: math.prod(tensor.shape))
        return _STORED.get(largest.kind, "quantized")

    def form(self, name: str) -> QuantizedForm | None:
        """How a tensor is quantized; None if `read_quantized` returns None."""
        return form_of(self._tensors[name].kind) if name in self._tensors else None

    def read(self, name: str, part: Slices = ()) -> np.ndarray:
        """A tensor, or a part of it, dequantized to float32 (a view of the file if stored so).

        Raises:
          CheckpointError: its quantization cannot be undone.
        """
        tensor = self._tensors[name]
        if tensor.dtype.kind == "i":
            raise CheckpointError(
                f"{self.path}: tensor {name!r} holds integers ({tensor.kind.name}), which "
                "weights never are. Download it again."
            )
        # Mapped anew each time: pages of a file that stays mapped count as this process's memory.
        data = np.memmap(self.path, tensor.dtype, "r", tensor.offset, tensor.stored_shape)
        rows, columns = part[:1], part[1:]
        try:
            # Only rows can be dequantized by themselves.
            array = dequantize(data[rows], tensor.kind)
        except NotImplementedError:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is of type {tensor.kind.name}, which cannot "
                "be dequantized; use a file of type F16, BF16, Q8_0 or Q4_K."
            ) from None
        return array.reshape(-1, *self.shapes[name][1:])[(slice(None), *columns)]

    def read_quantized(self, name: str) -> Quantized | None:
        """A matrix, or a stack, as quantized in the file; None if it is not."""
        tensor = self._tensors[name]
        data = np.memmap(self.path, tensor.dtype, "r", tensor.offset, tensor.stored_shape)
        rows = unpack(data.reshape(-1, data.shape[-1]), tensor.kind)
        return rows and rows.map(lambda part: part.reshape(*data.shape[:-1], -1))
