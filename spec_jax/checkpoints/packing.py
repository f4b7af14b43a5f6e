"""The form of a model's matrices in memory: plain, quantized, or packed for native code."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np
from jax.typing import DTypeLike

from spec_jax.config import AUTO, QUANTIZATIONS, Activations
from spec_jax.kernels import PackedWeight, Quantized, QuantizedWeight, Weight, quantize
from spec_jax.models.family import Stored

STORED = "stored"
"""The dtype that keeps every number of a checkpoint; for files, not for computing."""


def is_multiplied(name: str, shape: Sequence[int]) -> bool:
    """Whether a weight is a matrix, or a stack of them, but not a table indexed by positions."""
    return len(shape) > 1 and name.split(".")[-2] not in ("positions", "relative")


def is_quantized(name: str, shape: Sequence[int]) -> bool:
    """Whether a weight is quantized in a quantized model; a router would choose other experts."""
    return is_multiplied(name, shape) and name.split(".")[-2] != "router"


@dataclasses.dataclass(frozen=True)
class Packing:
    """The form of matrices; false for plain arrays.

    Attributes:
      quantization: `none`, `int8`, `int4`, `gguf` for the format of the file, or `auto`.
      native: whether native code multiplies them.
      activations: what native code rounds the inputs of quantized matrices to.
    """

    quantization: str = "none"
    native: bool = False
    activations: Activations = "float32"

    def __post_init__(self) -> None:
        assert self.quantization in QUANTIZATIONS

    def __bool__(self) -> bool:
        return self.native or self.quantization != "none"

    def settled(self, dtype: str, stored: Stored) -> tuple[str, "Packing"]:
        """The dtype and the packing; `auto` is the fastest form that keeps the stored values.

        Native code reads bfloat16 and GGUF blocks directly. Without it a CPU computes fastest
        in float32: XLA's bfloat16 products pack each weight anew in every call.
        """
        quantization = self.quantization
        if quantization == AUTO:
            quantization = "gguf" if self.native and stored == "quantized" else "none"
        if dtype == STORED:
            dtype = "bfloat16" if stored == "bfloat16" else "float32"
        elif dtype == AUTO and jax.default_backend() != "cpu":
            dtype = "float32" if stored == "float32" else "bfloat16"
        elif dtype == AUTO:
            dtype = "bfloat16" if self.native and stored == "bfloat16" else "float32"
        activations = self.activations
        if activations == AUTO:
            activations = "int8" if self.native else "float32"
        return dtype, dataclasses.replace(self, quantization=quantization, activations=activations)

    @property
    def rounds(self) -> bool:
        """Whether the weights are rounded."""
        return self.quantization in ("int8", "int4")

    @property
    def bits(self) -> Literal[8, 4]:
        """Of a rounded weight."""
        return 8 if self.quantization == "int8" else 4

    @property
    def as_stored(self) -> bool:
        """Whether a matrix keeps the quantized form of its file."""
        return self.quantization == "gguf"

    def of(self, name: str, shape: Sequence[int]) -> "Packing":
        """The packing of the weight of this name."""
        if not is_multiplied(name, shape):
            return Packing()
        return self if is_quantized(name, shape) else dataclasses.replace(self, quantization="none")

    def rounded(self, rows: np.ndarray | Quantized, dtype: DTypeLike) -> np.ndarray | Quantized:
        """A matrix [out, in], or a stack of them, after quantization or conversion.

        Args:
          rows: the matrix.
          dtype: the dtype of matrices that are not quantized.
        """
        if isinstance(rows, np.ndarray) and self.rounds:
            if rows.ndim > 2:
                return Quantized.stack([quantize(each, self.bits) for each in rows])
            return quantize(rows, self.bits)
        return rows if isinstance(rows, Quantized) else rows.astype(dtype, copy=False)

    def pack(self, rows: np.ndarray | Quantized, leaf: jax.ShapeDtypeStruct) -> Weight:
        """A matrix [out, in], or a stack of them, in its final form on its devices.

        Args:
          rows: the result of `rounded`.
          leaf: dtype and sharding of the plain array [in, out] that it stands for.
        """
        if self.native:
            return PackedWeight.of(rows, self.activations)
        if isinstance(rows, Quantized):
            if leaf.sharding is None and jax.default_backend() == "cpu":
                # XLA:CPU would write the whole matrix out at every call.
                return jax.device_put(np.ascontiguousarray(rows.dequantize().swapaxes(-1, -2)))
            return QuantizedWeight.of(rows, leaf.dtype, leaf.sharding)
        array = np.ascontiguousarray(rows.swapaxes(-1, -2))
        return jax.device_put(array, leaf.sharding)
