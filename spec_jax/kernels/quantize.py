"""Quantizes matrices."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float, Shaped

GROUP = 32
"""Inputs that share a scale where 4 bits are chosen."""


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A quantized matrix in host memory, or a stack of them: `scales * values + minima`.

    Attributes:
      values: int8; or uint8 of 0 to 15, if `bits` is 4.
      scales: float32 or float16; neighbouring inputs share one.
      minima: of the scales' dtype, or None for 0.
      bits: 8 or 4.
    """

    values: Shaped[np.ndarray, "*stack out in"]
    scales: Shaped[np.ndarray, "*stack out groups"]
    minima: Shaped[np.ndarray, "*stack out groups"] | None
    bits: Literal[8, 4]

    @classmethod
    def stack(cls, matrices: Sequence["Quantized"]) -> "Quantized":
        """Matrices of one shape and the same number of bits, one after another."""
        minima = [each.minima for each in matrices if each.minima is not None]
        return cls(
            np.stack([each.values for each in matrices]),
            np.stack([each.scales for each in matrices]),
            np.stack(minima) if minima else None,
            matrices[0].bits,
        )

    def map(self, change: Callable[[np.ndarray], np.ndarray]) -> "Quantized":
        """The same matrix with its rows changed, all parts alike."""
        minima = None if self.minima is None else change(self.minima)
        return Quantized(change(self.values), change(self.scales), minima, self.bits)

    def dequantize(self) -> Float[np.ndarray, "*stack out in"]:
        """The matrix in float32."""
        values = self.values.reshape(*self.scales.shape, -1).astype(np.float32)
        values *= self.scales[..., None].astype(np.float32)
        if self.minima is not None:
            values += self.minima[..., None].astype(np.float32)
        return values.reshape(self.values.shape)


def quantize(weight: Float[np.ndarray, "out in"], bits: Literal[8, 4]) -> Quantized:
    """Rounds a matrix to the nearest numbers of 8 or 4 bits.

    8 bits: one scale an output, symmetric around 0. 4 bits: groups of 32 inputs, from the smallest
    to the largest weight of each (as GGUF's Q4_1); inputs that 32 does not divide are one group.
    """
    weight = np.asarray(weight, np.float32)
    outputs, inputs = weight.shape
    if bits == 8:
        scales = np.abs(weight).max(1, initial=0, keepdims=True) / np.float32(127)
        values = np.rint(_divide(weight, scales)).astype(np.int8)
        return Quantized(values, scales, None, 8)
    grouped = weight.reshape(outputs, -1, inputs if inputs % GROUP else GROUP)
    minima, scales = grouped.min(2), np.ptp(grouped, 2) / np.float32(15)
    # Half precision ends at 65,504 and has few digits below 6e-5.
    if np.abs(minima).max() < 6e4 and ((scales == 0) | (scales > 6e-5)).all():
        minima, scales = minima.astype(np.float16), scales.astype(np.float16)
    above = grouped - minima[:, :, None].astype(np.float32)
    values = np.rint(_divide(above, scales[:, :, None].astype(np.float32))).clip(0, 15)
    return Quantized(values.astype(np.uint8).reshape(outputs, inputs), scales, minima, 4)


def _divide(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The quotient, or 0 where the scale is 0."""
    return np.divide(values, scales, out=np.zeros_like(values), where=scales > 0)
