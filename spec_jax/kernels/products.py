"""Products of activations with weights of every form."""

from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from spec_jax.kernels import native_calls
from spec_jax.kernels.packed_weight import PackedWeight
from spec_jax.kernels.quantized_weight import QuantizedWeight

Weight = Array | QuantizedWeight | PackedWeight
"""A matrix [in, out]."""


def precision_of(dtype: DTypeLike) -> jax.lax.Precision | None:
    """The precision to ask for in products with weights, or keys and values, of a dtype.

    By default float32 products are single bfloat16 passes on TPU and TF32 on newer GPUs. Float32
    weights get full precision instead: six bfloat16 passes on TPU.
    """
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else None


def products(
    x: Float[Array, "*lead in"],
    weights: Sequence[Weight],
    sums: DTypeLike = jnp.float32,
    num_tokens: Int[Array, " batch"] | None = None,
    biases: Sequence[Float[Array, " _"] | None] | None = None,
    residual: Float[Array, "*lead out"] | None = None,
) -> list[Array]:
    """`x` times each of the weights, [*lead, out] in float32, and what is added to them.

    The inputs of a product are rounded to its weight's dtype, but stay float32 where the weight is
    quantized. A device sums in float32, and rounds its sum to `sums` before devices that hold parts
    of the inputs add theirs. Packed weights of one format are one call of native code, which skips
    padding: of inputs [batch, tokens, in], all but the first `num_tokens` of each. The results of
    padding are any numbers.

    Args:
      x: the inputs.
      weights: the matrices.
      sums: see above (static).
      num_tokens: see above.
      biases: a vector for each product, in float32; None for nothing.
      residual: what is added to the product of a single weight, after its bias.
    """
    biases = [None] * len(weights) if biases is None else biases
    packed = [weight for weight in weights if isinstance(weight, PackedWeight)]
    if len(packed) == len(weights):
        return _packed_products(x, packed, num_tokens, biases, residual)
    outputs = [_product(x, weight, sums) for weight in weights]
    outputs = [
        out if bias is None else out + bias.reshape((1,) * (x.ndim - 1) + (-1,))
        for out, bias in zip(outputs, biases, strict=True)
    ]
    return outputs if residual is None else [residual + outputs[0]]


def _product(x: Float[Array, "*lead in"], weight: Weight, sums: DTypeLike) -> Array:
    if isinstance(weight, PackedWeight):
        return _packed_products(x, [weight], None, [None], None)[0]
    if not isinstance(weight, QuantizedWeight):
        return _dot(x, weight, sums).astype(jnp.float32)
    if weight.minima is None and len(weight.scales) == 1 and weight.values.dtype == jnp.int8:
        # Scales after the product: the values without scales are exact in bfloat16.
        scales = weight.scales.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
        values = weight.values.astype(weight.dtype).reshape(weight.shape)
        return _dot(x, values, sums).astype(jnp.float32) * scales
    return _dot_in_groups(x, weight, sums).astype(jnp.float32)


def _packed_products(
    x: Float[Array, "*lead in"],
    weights: Sequence[PackedWeight],
    num_tokens: Int[Array, " batch"] | None,
    biases: Sequence[Array | None],
    residual: Float[Array, "*lead out"] | None,
) -> list[Array]:
    rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    by_format: dict[Hashable, list[int]] = {}
    for i, weight in enumerate(weights):
        by_format.setdefault(weight.signature, []).append(i)
    outputs: dict[int, Array] = {}
    added = None if residual is None else residual.reshape(-1, residual.shape[-1])
    for some in by_format.values():
        each = [weights[i] for i in some], num_tokens, [biases[i] for i in some], added
        results = native_calls.products(rows, *each)
        outputs |= zip(some, results, strict=True)
    return [outputs[i].reshape(*x.shape[:-1], -1) for i in range(len(weights))]


def columns(weight: Weight, ids: Int[Array, "*lead"]) -> Float[Array, "*lead in"]:
    """Columns of a weight in float32: a look-up in a table [embed, vocab]."""
    if not isinstance(weight, jax.Array):
        return weight.columns(ids)
    # XLA:CPU widens a bfloat16 table to float32 before it gathers. The barrier keeps that next
    # to the gather, where it fuses; hoisted out of the loop it would hold the whole table.
    table, ids = jax.lax.optimization_barrier((weight, ids))
    return jnp.moveaxis(jnp.take(table, ids, axis=1), 0, -1).astype(jnp.float32)


def take_outputs(weight: Weight, ids: Int[Array | np.ndarray, " some"]) -> Weight:
    """The same weight with these of its outputs, in this order."""
    return (
        jnp.take(weight, ids, axis=1) if isinstance(weight, jax.Array) else weight.take_outputs(ids)
    )


def _dot(x: Array, weight: Array, sums: DTypeLike) -> Array:
    return jax.lax.dot_general(
        x.astype(weight.dtype),
        weight,
        (((x.ndim - 1,), (0,)), ((), ())),
        precision=precision_of(weight.dtype),
        preferred_element_type=sums,
    )


def _dot_in_groups(x: Float[Array, "*lead in"], weight: QuantizedWeight, sums: DTypeLike) -> Array:
    """A product whose weight is widened inside of it.

    The two halves of bytes are separate products, and scales are spread as a matrix: XLA for TPUs
    writes any other form to memory (tests/planning/test_tpu.py). The products are added in `sums`,
    so that devices exchange one sum.
    """
    groups, outputs = weight.scales.shape
    lead, values = x.shape[:-1], weight.values
    x = x.astype(weight.dtype).reshape(*lead, groups, -1)
    if values.dtype == jnp.uint8:
        inputs, parts = jnp.split(x, 2, axis=-1), [values & 15, values >> 4]
    else:
        inputs, parts = [x], [values]
    rows = values.size // outputs
    shape = groups, rows // groups, outputs
    scales = jnp.broadcast_to(weight.scales[:, None], shape).reshape(values.shape)
    out = jnp.zeros((), sums)
    for some, part in zip(inputs, parts, strict=True):
        widened = part.astype(jnp.float32) * scales.astype(jnp.float32)
        widened = widened.astype(weight.dtype).reshape(rows, outputs)
        out += _dot(some.reshape(*lead, -1), widened, sums)
    if weight.minima is not None:
        out += _dot(x.astype(jnp.float32).sum(-1), weight.minima.astype(sums), sums)
    return out
