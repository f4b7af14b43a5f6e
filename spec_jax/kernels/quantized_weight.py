"""Quantized weights as XLA multiplies them.

A stack of matrices of one shape, such as experts have, is the same pytree with one more axis in
front of each of its arrays.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from spec_jax.kernels.quantize import Quantized, QuantizedForm
from spec_jax.pytree import pytree, static
from spec_jax.sharding import HOST_MEMORY

HOST_ROWS = 8
"""Rows of bytes that lie together in host memory.

libtpu 0.0.42 tiles bytes by 32 rows on the device and by 8 on the host, and cannot copy between
the two tilings. Eight rows are one tile in both.
"""


@pytree
class QuantizedWeight:
    """A quantized matrix as XLA multiplies it: `scales * values + minima`.

    Attributes:
      values: int8 [in, out], or bytes [in / 2, out] of two inputs each: the low half holds the
        first inputs of a group, the high half the others. JAX's 4-bit dtypes cannot be passed to a
        program that was compiled ahead for a mesh (jax 0.10.2). In host memory the shape is
        [rows / 8, 8, out].
      scales: [groups, out], float32 or float16; neighbouring inputs share one.
      minima: the same shape and dtype, or None for 0.
      dtype: the dtype that inputs of its products are rounded to; static.
    """

    values: Array
    scales: Array
    minima: Array | None
    dtype: str = static()

    @classmethod
    def of(
        cls, weight: Quantized, dtype: DTypeLike, sharding: NamedSharding | None = None
    ) -> "QuantizedWeight":
        """The same matrix on devices; groups are cut where a layout cuts inputs."""

        def put(rows: np.ndarray) -> Array:
            part = np.ascontiguousarray(rows.swapaxes(-1, -2))
            if sharding is None:
                return jnp.asarray(part)
            shape, placed = _placed(part.shape, part.dtype, sharding)
            part = part.reshape(shape)
            return jax.make_array_from_callback(shape, placed, lambda index: part[index])

        weight = weight.simplified()
        values, (*lead, inputs) = weight.values, weight.values.shape
        groups = _groups(weight.scales.shape[-1], weight.bits, sharding)

        def spread(numbers: np.ndarray) -> np.ndarray:
            return np.repeat(numbers, groups // numbers.shape[-1], axis=-1)

        if weight.bits == 4 and inputs // groups % 2 == 0:
            low, high = np.split(values.reshape(*lead, groups, -1), 2, axis=-1)
            values = (low | high << 4).reshape(*lead, -1)
        else:
            values = values.astype(np.int8)
        minima = None if weight.minima is None else put(spread(weight.minima))
        return cls(put(values), put(spread(weight.scales)), minima, jnp.dtype(dtype).name)

    @classmethod
    def abstract(cls, matrix: jax.ShapeDtypeStruct, form: QuantizedForm) -> "QuantizedWeight":
        """Shapes and shardings of a matrix [in, out], or of a stack, in a quantized form."""
        *stack, inputs, outputs = matrix.shape

        def part(rows: int, dtype: DTypeLike) -> Any:
            shape, sharding = (*stack, rows, outputs), matrix.sharding
            if sharding is not None:
                shape, sharding = _placed(shape, dtype, sharding)
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        name = jnp.dtype(matrix.dtype).name
        groups = 1 if form.group is None or inputs % form.group else inputs // form.group
        groups = _groups(groups, form.bits, matrix.sharding)
        halved = form.bits == 4 and inputs // groups % 2 == 0
        values = part(inputs // 2, jnp.uint8) if halved else part(inputs, jnp.int8)
        minima = part(groups, form.scales) if form.has_minima else None
        return cls(values, part(groups, form.scales), minima, name)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the matrix, [in, out], or of the stack."""
        stack = self.scales.shape[:-2]
        *rows, outputs = self.values.shape[len(stack) :]
        inputs = math.prod(rows) * (2 if self.values.dtype == jnp.uint8 else 1)
        return *stack, inputs, outputs

    def columns(self, ids: Int[Array, "*lead"]) -> Float[Array, "*lead in"]:
        """Columns of the matrix, in float32."""
        return jnp.moveaxis(self.take_outputs(ids.ravel()).dequantize(), 0, -1).reshape(
            *ids.shape, -1
        )

    def take_outputs(self, ids: Int[Array | np.ndarray, " some"]) -> "QuantizedWeight":
        """The matrix with these columns alone."""
        return jax.tree.map(lambda part: jnp.take(part, ids, axis=-1), self)

    def dequantize(self) -> Float[Array, "*stack in out"]:
        """The matrix in float32."""
        if self.scales.ndim > 2:
            return jax.vmap(QuantizedWeight.dequantize)(self)
        groups, outputs = self.scales.shape
        values = self.values.reshape(groups, -1, outputs)
        if values.dtype == jnp.uint8:
            values = jnp.concatenate([values & 15, values >> 4], axis=1)
        values = values.astype(jnp.float32) * self.scales[:, None].astype(jnp.float32)
        if self.minima is not None:
            values = values + self.minima[:, None].astype(jnp.float32)
        return values.reshape(-1, outputs)


def _groups(groups: int, bits: int, sharding: NamedSharding | None) -> int:
    """The smallest multiple of `groups` that a layout does not cut where it cuts inputs.

    Every shard has the one scale of all inputs, but two inputs of a byte are half a group apart.
    """
    if sharding is None or (groups == 1 and bits == 8):
        return groups
    return math.lcm(groups, _shards(sharding, sharding.spec[-2]))


def _shards(sharding: NamedSharding, axes: Any) -> int:
    names = axes if isinstance(axes, tuple) else (axes,)
    return math.prod(sharding.mesh.shape[name] for name in names if name is not None)


def _placed(
    shape: tuple[int, ...], dtype: DTypeLike, sharding: NamedSharding
) -> tuple[tuple[int, ...], NamedSharding]:
    """The shape of a part [*stack, rows, out], and its sharding: the matrix's where it fits.

    Along the inputs it is sharded only if the shards divide the rows. A single row stays on the
    device, and so do bytes whose rows `HOST_ROWS` does not divide.
    """
    (*stack, rows, outputs), memory = shape, sharding.memory_kind
    axes = (*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))
    *stack_axes, inputs_axes, outputs_axes = axes
    bytes_ = jnp.dtype(dtype).itemsize == 1
    if memory == HOST_MEMORY and (rows == 1 or (bytes_ and rows % HOST_ROWS)):
        memory = None
    tiles = (rows // HOST_ROWS, HOST_ROWS) if memory == HOST_MEMORY and bytes_ else (rows,)
    if tiles[0] % _shards(sharding, inputs_axes):
        inputs_axes = None
    spec = P(*stack_axes, inputs_axes, *(None,) * (len(tiles) - 1), outputs_axes)
    placed = NamedSharding(sharding.mesh, spec, memory_kind=memory)
    return (*stack, *tiles, outputs), placed


def part_specs(weight: Any, spec: P) -> Any:
    """The specs of a weight's arrays, if the matrix is sharded by `spec`."""
    if not isinstance(weight, QuantizedWeight):
        return spec
    *stack, inputs, outputs = spec

    def of(part: Array) -> P:
        rows = None if part.shape[len(stack)] == 1 else inputs
        return P(*stack, rows, *(None,) * (part.ndim - len(spec)), outputs)

    return jax.tree.map(of, weight)
