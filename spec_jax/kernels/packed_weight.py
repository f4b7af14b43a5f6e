"""Weights in panels, as native code multiplies them.

A stack of matrices of one shape, such as experts have, is the same pytree with one more axis in
front of each of its arrays.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped, UInt8, UInt32

from spec_jax.config import Activations
from spec_jax.kernels import native_blocks
from spec_jax.kernels.quantize import Quantized
from spec_jax.kernels.row_blocks import in_row_blocks
from spec_jax.pytree import pytree, static

LANES = 16
"""Outputs of a panel."""
STEPS = {"float32": 1, "bfloat16": 2, "int8": 4, "uint4": 8}
"""Inputs that native code reads at once; a packed weight has zeros up to a multiple of them."""
ROUNDED_STEP = 32
"""The same where activations are rounded: the inputs that share a scale."""
OFFSETS = {"int4": 8, "int5": 16, "int6": 32}
"""What is added to values of fewer than 8 bits that have signs."""


@pytree
class PackedWeight:
    """A matrix in panels of 16 outputs, in which 16 neighbouring numbers belong to the outputs.

    Attributes:
      values: the numbers by panel and input, [panels, in, 16] of float32 or int8, [panels, in / 2,
        16, 2] of bfloat16, or [panels, words, 16] of fewer bits, as `_words` describes. Where
        activations are rounded, int8 is [panels, in / 4, 16, 4].
      scales: [panels, groups, 16], or None for 1; this and what follows as in `Quantized`.
      minima: the same shape, or None.
      scale_units: [panels, blocks, 16], or None.
      minimum_units: the same shape, or None.
      format: `float32`, `bfloat16`, `int8`, or the bits of values, such as `uint4`; static.
      shape: sizes of the matrix, or of each matrix of a stack, [in, out]; static.
      activations: the dtype that inputs of its products are rounded to: `float32`, or `int8` with
        one scale for 32 neighbouring inputs, or for the 16 of a smaller group; static.
    """

    values: Array
    scales: Array | None
    minima: Array | None
    scale_units: Array | None
    minimum_units: Array | None
    format: str = static()
    shape: tuple[int, int] = static()
    activations: Activations = static()

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of products with it."""
        return jnp.dtype(jnp.float32)

    @classmethod
    def of(
        cls, weight: np.ndarray | Quantized, activations: Activations = "float32"
    ) -> "PackedWeight":
        """Packs a matrix [out, in] of float32 or bfloat16, or a quantized one, or a stack.

        Args:
          weight: the matrix.
          activations: the field of this name, for a quantized matrix; others keep float32.
        """
        if not isinstance(weight, Quantized):
            kind, shape = weight.dtype.name, (weight.shape[-1], weight.shape[-2])
            values = _panels(weight, STEPS[kind], 2 if kind == "bfloat16" else 1)
            return cls(values, None, None, None, None, kind, shape, "float32")
        if activations == "float32":
            weight = weight.simplified()
        *_, outputs, inputs = weight.values.shape
        kind = f"{'u' * (weight.values.dtype == np.uint8)}int{weight.bits}"
        step = ROUNDED_STEP if activations == "int8" else STEPS[kind]
        if (groups := weight.scales.shape[-1]) > 1:
            group = inputs // groups
            fits = group in (16, 32) if activations == "int8" else group % step == 0
            if not fits or group * groups != inputs:
                raise ValueError(f"{inputs} inputs in {groups} groups are not whole steps")
            step = group
        if kind == "int8" and activations == "float32":
            values = _panels(weight.values, step)
        else:
            values = _words_in_panels(weight.values, kind, step)

        def part(numbers: np.ndarray | None) -> Array | None:
            return None if numbers is None else _panels(numbers)

        return cls(
            values,
            part(weight.scales),
            part(weight.minima),
            part(weight.scale_units),
            part(weight.minimum_units),
            kind,
            (inputs, outputs),
            activations,
        )

    def columns(self, ids: Int[Array, "*lead"]) -> Float[Array, "*lead in"]:
        """Columns of the matrix, in float32."""
        panel, lane = ids // LANES, ids % LANES
        if self.format == "bfloat16":
            # As integers: XLA:CPU widens a bfloat16 table before it gathers.
            words = jax.lax.bitcast_convert_type(self.values, jnp.uint16)[panel, :, lane]
            numbers = jax.lax.bitcast_convert_type(words, jnp.bfloat16)
        else:
            numbers = self.values[panel, :, lane]
        if self.values.ndim > 3:
            numbers = numbers.reshape(*ids.shape, -1)
        if self.values.dtype == jnp.uint32:
            bits = int(self.format[-1])
            numbers = _numbers(numbers, bits).astype(jnp.int32) - OFFSETS.get(self.format, 0)
        numbers = numbers.astype(jnp.float32)

        def of_groups(part: Array, units: Array | None) -> Array:
            of_group = part[panel, :, lane].astype(jnp.float32)
            if units is not None:
                of_block = units[panel, :, lane].astype(jnp.float32)
                of_group *= jnp.repeat(of_block, of_group.shape[-1] // of_block.shape[-1], -1)
            return of_group[..., None]

        if self.scales is not None:
            scales = of_groups(self.scales, self.scale_units)
            numbers = numbers.reshape(*scales.shape[:-1], -1) * scales
        if self.minima is not None:
            numbers = numbers + of_groups(self.minima, self.minimum_units)
        return numbers.reshape(*ids.shape, -1)[..., : self.shape[0]]

    def take_outputs(self, ids: Int[Array | np.ndarray, " some"]) -> "PackedWeight":
        """The matrix with these columns alone."""
        # Outside of a program XLA would compile each operation.
        xp: Any = np if isinstance(ids, np.ndarray) else jnp

        def take(part: Array) -> Array:
            rows = xp.asarray(part)[ids // LANES, :, ids % LANES]
            rows = xp.pad(rows, ((0, -len(ids) % LANES), *((0, 0),) * (rows.ndim - 1)))
            panels = xp.moveaxis(rows.reshape(-1, LANES, *rows.shape[1:]), 1, 2)
            return jax.device_put(np.ascontiguousarray(panels)) if xp is np else panels

        return dataclasses.replace(jax.tree.map(take, self), shape=(self.shape[0], len(ids)))

    @property
    def scaling(self) -> tuple[Array | None, ...]:
        """Scales, minima and their units."""
        return self.scales, self.minima, self.scale_units, self.minimum_units

    @property
    def signature(self) -> tuple:
        """The format of all parts: the same for all weights of a native call."""
        parts = [None if part is None else (part.shape[-2], part.dtype) for part in self.scaling]
        return self.format, self.activations, *parts

    @property
    def is_stack(self) -> bool:
        """Whether it stands for several matrices."""
        rounded_bytes = self.format == self.activations == "int8"
        return self.values.ndim > (4 if rounded_bytes or self.format == "bfloat16" else 3)

    def dequantize(self) -> Float[Array, "*stack in out"]:
        """The matrix in float32."""
        if self.is_stack:
            return jax.vmap(PackedWeight.dequantize)(self)
        return self.columns(jnp.arange(self.shape[1])).T


def _panels(rows: np.ndarray, step: int = 1, neighbours: int = 1) -> Array:
    """Rows [*stack, out, in] of any dtype as panels.

    Args:
      rows: the matrix.
      step: zeros are added up to a multiple of this number of inputs.
      neighbours: inputs of an output that lie together.
    """
    *stack, _, _ = rows.shape
    padded = _padded(rows, LANES, step)
    if neighbours > 1:
        padded = np.ascontiguousarray(padded)
    # Neighbours as one integer, which NumPy moves faster than several.
    integers = padded.view(f"u{padded.itemsize * neighbours}")
    panels = integers.reshape(-1, LANES, integers.shape[-1])
    (packed,) = in_row_blocks(
        lambda some: [panels[some].swapaxes(1, 2)], len(panels), panels[0].size
    )
    packed = np.ascontiguousarray(packed).reshape(*stack, -1, *packed.shape[1:])
    packed = packed.view(padded.dtype)
    # `jnp.asarray` would compile a program for each shape.
    return jax.device_put(
        packed.reshape(*packed.shape[:-1], LANES, -1) if neighbours > 1 else packed
    )


def _words_in_panels(values: Shaped[np.ndarray, "*stack out in"], kind: str, step: int) -> Array:
    """Values of 4 to 8 bits in panels: words, or int8 of which four neighbours lie together."""
    bits = int(kind[-1])
    words = native_blocks.pack_words(values, bits, OFFSETS.get(kind, 0))
    if words is None:
        return _panels(values, step, 4) if bits == 8 else _panels(_words(values, kind, step))
    return jax.device_put(words.view(np.int8).reshape(*words.shape, 4) if bits == 8 else words)


def _padded(rows: np.ndarray, outputs: int, inputs: int) -> np.ndarray:
    """Rows [*stack, out, in] with zeros up to multiples; the same array if it needs none."""
    beyond = [(0, -rows.shape[-2] % outputs), (0, -rows.shape[-1] % inputs)]
    if not any(count for _, count in beyond):
        return rows
    return np.pad(rows, [*[(0, 0)] * (rows.ndim - 2), *beyond])


def _words(
    values: Shaped[np.ndarray, "*stack out in"], kind: str, step: int
) -> UInt32[np.ndarray, "*stack out words"]:
    """Values of 4 to 6 bits in words, with zeros up to a multiple of `step` inputs."""
    rows = values.reshape(-1, values.shape[-1])

    def words(block: slice) -> list[np.ndarray]:
        some = rows[block]
        if kind in OFFSETS:
            some = (some + np.int8(OFFSETS[kind])).view(np.uint8)
        return [_words_of(_padded(some, 1, step), int(kind[-1]))]

    (packed,) = in_row_blocks(words, *rows.shape)
    return packed.reshape(*values.shape[:-1], -1)


def _words_of(
    values: UInt8[np.ndarray, "*lead in"], bits: int
) -> UInt32[np.ndarray, "*lead words"]:
    """Values of 4 to 6 bits in words of 32 bits.

    A word has the lowest four bits of eight neighbours, the first in the lowest. With 5 bits each
    four such words, and with 6 bits each two, are followed by one of the other bits: its bytes have
    these of inputs 2 b and 2 b + 1 of every eight, where b is the byte's number, in the order of
    the inputs.
    """
    values = np.ascontiguousarray(values)
    lead, low = values.shape[:-1], values if bits == 4 else values & 15
    pairs = low.view("<u2")  # the second of two neighbours in the high byte
    words = (pairs | pairs >> 4).astype(np.uint8).view(np.uint32)
    if bits == 4:
        return words
    width = bits - 4
    pairs = (values >> 4).view("<u2")
    eights = (pairs | pairs >> 8 - width).astype(np.uint8).view(np.uint32)
    # Of each byte the bits of two inputs count.
    eights = eights.reshape(*lead, -1, 4 // width) & np.uint32(0x01010101 * (4**width - 1))
    high = eights[..., 0]
    for i in range(1, 4 // width):
        high = high | eights[..., i] << np.uint32(2 * width * i)
    low = words.reshape(*lead, -1, 4 // width)
    return np.concatenate([low, high[..., None]], axis=-1).reshape(*lead, -1)


def _numbers(words: UInt32[Array, "*lead words"], bits: int) -> UInt32[Array, "*lead in"]:
    """The values of words that `_words` made."""
    lead, width = words.shape[:-1], bits - 4
    nibbles = 4 * np.arange(8, dtype=np.uint32).reshape(1, 1, 1, -1)
    lines = 1 if bits == 4 else 4 // width + 1
    words = words.reshape(math.prod(lead), -1, lines)
    if bits == 4:
        return (words[..., None] >> nibbles & 15).reshape(*lead, -1)
    low = (words[..., :-1, None] >> nibbles & 15).reshape(*words.shape[:2], -1)
    eight, byte, half = np.indices((4 // width, 4, 2)).reshape(3, 1, 1, -1)
    shifts = (8 * byte + width * (2 * eight + half)).astype(np.uint32)
    high = words[..., -1:] >> shifts & (2**width - 1)
    return (low | high << 4).reshape(*lead, -1)
