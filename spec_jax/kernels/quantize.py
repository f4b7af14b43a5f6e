"""Quantizes matrices."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float, Shaped

from spec_jax.kernels.row_blocks import in_row_blocks

GROUP = 32
"""Inputs that share a scale where 4 bits are chosen."""


@dataclasses.dataclass(frozen=True)
class QuantizedForm:
    """How a matrix is quantized, whatever its numbers.

    Attributes:
      bits: of a value, 8 or 4.
      group: inputs that share a scale; None for all inputs of an output.
      scales: the dtype of scales and minima.
      has_minima: whether groups have minima.
    """

    bits: int
    group: int | None
    scales: str
    has_minima: bool


INT8, INT4 = QuantizedForm(8, None, "float32", False), QuantizedForm(4, GROUP, "float16", True)
"""The forms that `quantize` makes."""


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A quantized matrix in host memory, or a stack of them: `scales * values + minima`.

    Attributes:
      values: int8, from -2^(bits - 1) on, or uint8, from 0 on.
      scales: float32 or float16; neighbouring inputs share one. With units they are int8.
      minima: of the scales' dtype, or None for 0, as they are where values are int8 of fewer bits.
      bits: of a value, 8, 6, 5 or 4.
      scale_units: float16 by which scales are multiplied, or None; neighbouring scales share one.
      minimum_units: the same for minima.
    """

    values: Shaped[np.ndarray, "*stack out in"]
    scales: Shaped[np.ndarray, "*stack out groups"]
    minima: Shaped[np.ndarray, "*stack out groups"] | None
    bits: int
    scale_units: Shaped[np.ndarray, "*stack out blocks"] | None = None
    minimum_units: Shaped[np.ndarray, "*stack out blocks"] | None = None

    @classmethod
    def stack(cls, matrices: Sequence["Quantized"]) -> "Quantized":
        """Matrices of one shape and the same form, as a stack."""
        joined = {
            name: np.stack([getattr(each, name) for each in matrices])
            for name in matrices[0].arrays
        }
        return dataclasses.replace(matrices[0], **joined)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The fields that are arrays, by name."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: each for name, each in fields.items() if isinstance(each, np.ndarray)}

    def map(self, change: Callable[[np.ndarray], np.ndarray]) -> "Quantized":
        """The same matrix with its rows changed, all parts alike."""
        return dataclasses.replace(
            self, **{name: change(each) for name, each in self.arrays.items()}
        )

    def simplified(self) -> "Quantized":
        """The same numbers with 8 bits, or 4 without a sign, and with scales that have no units."""
        values, bits = self.values, self.bits
        scales = _in_units(self.scales, self.scale_units)
        minima = self.minima
        if minima is not None:
            minima = _in_units(minima, self.minimum_units)
        if bits == 4 and values.dtype == np.int8:
            values = (values + np.int8(8)).astype(np.uint8)
            scales = scales.astype(np.float32)
            minima = np.float32(-8) * scales  # which half precision may not hold
        elif bits != 4:
            values, bits = values.astype(np.int8, copy=False), 8
        return Quantized(values, scales, minima, bits)

    def dequantize(self) -> Float[np.ndarray, "*stack out in"]:
        """The matrix in float32."""
        simple = self.simplified()
        values = simple.values.reshape(*simple.scales.shape, -1).astype(np.float32)
        values *= simple.scales[..., None].astype(np.float32)
        if simple.minima is not None:
            values += simple.minima[..., None].astype(np.float32)
        return values.reshape(self.values.shape)


def _in_units(numbers: np.ndarray, units: np.ndarray | None) -> np.ndarray:
    if units is None:
        return numbers
    products = numbers.reshape(*units.shape, -1).astype(np.float32)
    products *= units[..., None].astype(np.float32)
    return products.reshape(numbers.shape)


def quantize(weight: Float[np.ndarray, "out in"] | Quantized, bits: Literal[8, 4]) -> Quantized:
    """Rounds a matrix to the nearest numbers of 8 or 4 bits.

    8 bits: one scale an output, symmetric around 0. 4 bits: groups of 32 inputs, from the smallest
    to the largest weight of each (as GGUF's Q4_1); inputs that 32 does not divide are one group.
    """
    outputs, inputs = weight.values.shape if isinstance(weight, Quantized) else weight.shape

    def read(rows: slice) -> Float[np.ndarray, "out in"]:
        if isinstance(weight, Quantized):
            return weight.map(lambda part: part[rows]).dequantize()
        return np.asarray(weight[rows], np.float32)

    return _in_8_bits(read, outputs, inputs) if bits == 8 else _in_4_bits(read, outputs, inputs)


_Rows = Callable[[slice], Float[np.ndarray, "out in"]]
"""Reads some rows of a matrix in float32."""


def _in_8_bits(read: _Rows, outputs: int, inputs: int) -> Quantized:
    def rounded(rows: slice) -> list[np.ndarray]:
        some = read(rows)
        scales = np.abs(some).max(1, initial=0, keepdims=True) / np.float32(127)
        return [np.rint(_divide(some, scales)).astype(np.int8), scales]

    values, scales = in_row_blocks(rounded, outputs, inputs)
    return Quantized(values, scales, None, 8)


def _in_4_bits(read: _Rows, outputs: int, inputs: int) -> Quantized:
    group = inputs if inputs % GROUP else GROUP

    def grouped(rows: slice) -> Float[np.ndarray, "out groups group"]:
        some = read(rows)
        return some.reshape(len(some), -1, group)

    def ranges(rows: slice) -> list[np.ndarray]:
        some = grouped(rows)
        minima = some.min(2)
        return [minima, (some.max(2) - minima) / np.float32(15)]

    minima, scales = in_row_blocks(ranges, outputs, inputs)
    # Half precision ends at 65,504 and has few digits below 6e-5.
    if np.abs(minima).max() < 6e4 and ((scales == 0) | (scales > 6e-5)).all():
        minima, scales = minima.astype(np.float16), scales.astype(np.float16)

    def rounded(rows: slice) -> list[np.ndarray]:
        above = grouped(rows) - minima[rows, :, None].astype(np.float32)
        steps = np.rint(_divide(above, scales[rows, :, None].astype(np.float32))).clip(0, 15)
        return [steps.astype(np.uint8).reshape(len(steps), inputs)]

    (values,) = in_row_blocks(rounded, outputs, inputs)
    return Quantized(values, scales, minima, 4)


def _divide(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The quotient, or 0 where the scale is 0."""
    return np.divide(values, scales, out=np.zeros_like(values), where=scales > 0)
