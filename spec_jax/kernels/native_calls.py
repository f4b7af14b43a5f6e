"""Calls of native code from programs on one CPU."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from spec_jax.kernels import native
from spec_jax.kernels.packed_weight import OFFSETS, PackedWeight

_FORMATS = {"float32": 0, "bfloat16": 1, "int8": 2}
_FORMATS |= {"int4": 3, "uint4": 3, "int5": 4, "uint5": 4, "int6": 5}


def products(
    x: Float[Array, "rows in"],
    weights: Sequence[PackedWeight],
    num_tokens: Int[Array, " batch"] | None = None,
    biases: Sequence[Float[Array, " _"] | None] | None = None,
    residual: Float[Array, "rows out"] | None = None,
) -> list[Float[Array, "rows _"]]:
    """The rows times each weight, in one call.

    Args:
      x: float32. Products with bfloat16 weights round it to bfloat16, and products with weights
        whose `activations` are int8 round it to 8 bits, once for all weights.
      weights: packed weights of one signature.
      num_tokens: of the rows, which are [batch, tokens] one after another, how many tokens of each
        are real. Padding costs nothing, and its results are any numbers.
      biases: what is added to each product; None for nothing.
      residual: what is added to the product of a single weight, after its bias.
    """
    residual = jnp.zeros((0,), jnp.float32) if residual is None else residual
    inputs = [x, _counts(num_tokens), residual]
    if biases is None or all(each is None for each in biases):
        return _products(native.PRODUCT, inputs, weights, biases=False)
    vectors = [
        jnp.zeros((weight.shape[1],), jnp.float32) if bias is None else bias
        for weight, bias in zip(weights, biases, strict=True)
    ]
    return _products(native.PRODUCT, inputs, weights, vectors, biases=True)


def expert_products(
    x: Float[Array, "rows in"],
    experts: Int[Array, " rows"],
    weights: Sequence[PackedWeight],
) -> list[Float[Array, "rows _"]]:
    """Each row times its expert's matrix of each stack; the stacks are of one format.

    The matrices of a chosen expert are read once, and other matrices are not read.

    Args:
      x: the same as for `products`.
      experts: each row's expert; -1 for padding, whose results are zeros.
      weights: packed stacks of the same number of matrices; all have scales and minima, or none.
    """
    return _products(native.EXPERT_PRODUCT, [x, experts], weights)


def _products(
    target: str,
    inputs: list[Array],
    weights: Sequence[PackedWeight],
    vectors: Sequence[Array] = (),
    **attributes: bool,
) -> list[Array]:
    first, rows = weights[0], inputs[0].shape[0]
    parts = [
        [weight.values, *(part for part in weight.scaling if part is not None), *vectors[i : i + 1]]
        for i, weight in enumerate(weights)
    ]
    call = _call(
        target,
        [jax.ShapeDtypeStruct((rows, weight.shape[1]), jnp.float32) for weight in weights],
    )
    outputs = call(
        *inputs,
        *(part for each in parts for part in each),
        format=_FORMATS[first.format],
        integers=first.activations == "int8",
        offset=OFFSETS.get(first.format, 0),
        scales=first.scales is not None,
        minima=first.minima is not None,
        units=first.scale_units is not None,
        half=first.scales is not None and first.scales.dtype == jnp.float16,
        **attributes,
    )
    return list(outputs)


class AttentionCall(NamedTuple):
    """What attention reads of a call, whatever it writes; in float32.

    `positions` to `depths` are fields of `models.attention_mask.AttentionMask`, and `slopes` to
    `window` of `ScoreOptions` there.

    Attributes:
      queries: one head follows another.
      rotation: cosines and sines that turn the leading `2 * half` numbers of a head.
      positions: the position of each new token.
      start: the index of each row's first new token.
      context_lengths: how many tokens all new tokens see.
      tree_mask: which tokens after the context each new token sees, or None.
      depths: how far these tokens are from the text's end, or None.
      slopes: by how much a head's scores fall with the distance to a token.
      scale: queries are multiplied by it.
      cap: the bound of the scores, or None.
      window: how many tokens back a token sees, or None for all.
      ring: whether the slots of the cache are a ring, see `models.cache.KVState`.
    """

    queries: Float[Array, "batch tokens heads head_dim"]
    rotation: Float[Array, "2 batch tokens half"]
    positions: Int[Array, "batch tokens"]
    start: Int[Array, " batch"]
    context_lengths: Int[Array, " batch"]
    tree_mask: Bool[Array, "tokens num_recent"] | None
    depths: Int[Array, " num_recent"] | None
    slopes: Float[Array, " heads"]
    scale: float
    cap: float | None
    window: int | None
    ring: bool

    def arrays(self, keys: Array, values: Array) -> list[Array]:
        """The operands of native code."""
        tree_mask, depths = self.tree_mask, self.depths
        if tree_mask is None or depths is None:
            tree_mask = jnp.zeros((self.positions.shape[1], 0), bool)
            depths = jnp.zeros((0,), jnp.int32)
        lengths = self.positions, self.start, self.context_lengths
        return [self.queries, self.rotation, keys, values, *lengths, tree_mask, depths, self.slopes]

    def options(self) -> dict[str, Any]:
        """The attributes of native code."""
        return {
            "scale": np.float32(self.scale),
            "cap": np.float32(self.cap or 0),
            "window": self.window or 0,
            "ring": self.ring,
        }


def attention(
    call: AttentionCall,
    keys: Float[Array, "batch kv_heads slots head_dim"],
    values: Float[Array, "batch kv_heads slots head_dim"],
) -> Float[Array, "batch tokens heads head_dim"]:
    """Attention over the slots that some token sees; other slots are not read.

    Args:
      call: the new tokens.
      keys: the cache's keys, with the keys of the new tokens.
      values: the cache's values, with the values of the new tokens.
    """
    result = jax.ShapeDtypeStruct(call.queries.shape, jnp.float32)
    return _call(native.ATTENTION, result)(*call.arrays(keys, values), **call.options())


def write_and_attend(
    call: AttentionCall,
    keys: Float[Array, "batch kv_heads slots head_dim"],
    values: Float[Array, "batch kv_heads slots head_dim"],
    new_keys: Float[Array, "batch tokens kv_heads head_dim"],
    new_values: Float[Array, "batch tokens kv_heads head_dim"],
    num_tokens: Int[Array, " batch"] | None,
) -> tuple[Array, Array, Array]:
    """Attention after new keys, which it rotates, and new values are written; in place.

    Args:
      call: the new tokens.
      keys: the cache's keys.
      values: the cache's values.
      new_keys: the keys of the new tokens.
      new_values: the values of the new tokens.
      num_tokens: how many of each row's new tokens are written; None for all.

    Returns:
      As `attention`, and the cache's keys and values.
    """
    arrays = [*call.arrays(keys, values), new_keys, new_values, _counts(num_tokens)]
    results = [
        jax.ShapeDtypeStruct(each.shape, jnp.float32) for each in (call.queries, keys, values)
    ]
    run = _call(native.WRITE_AND_ATTEND, results, input_output_aliases={2: 1, 3: 2})
    return tuple(run(*arrays, **call.options()))


def norm(
    x: Float[Array, "rows size"],
    weight: Float[Array, " size"],
    bias: Float[Array, " size"] | None,
    num_tokens: Int[Array, " batch"] | None = None,
    *,
    eps: float,
    centered: bool,
) -> Float[Array, "rows size"]:
    """RMS norm of rows, or layer norm if `centered`, in float32.

    A row is the same, bit for bit, whatever rows are beside it. For `num_tokens` see `products`;
    padding becomes any numbers.
    """
    if bias is None:
        bias = jnp.zeros((0,), jnp.float32)
    call = _call(native.NORM, jax.ShapeDtypeStruct(x.shape, jnp.float32))
    return call(x, weight, bias, _counts(num_tokens), eps=np.float32(eps), centered=centered)


def norm_of_sum(
    x: Float[Array, "rows size"],
    added: Float[Array, "rows size"],
    weight: Float[Array, " size"],
    bias: Float[Array, " size"] | None,
    num_tokens: Int[Array, " batch"] | None = None,
    *,
    eps: float,
    centered: bool,
) -> tuple[Float[Array, "rows size"], Float[Array, "rows size"]]:
    """`x + added`, and `norm` of it."""
    if bias is None:
        bias = jnp.zeros((0,), jnp.float32)
    call = _call(native.NORM_OF_SUM, [jax.ShapeDtypeStruct(x.shape, jnp.float32)] * 2)
    counts = _counts(num_tokens)
    return tuple(call(x, added, weight, bias, counts, eps=np.float32(eps), centered=centered))


GATES = {"silu": 0, "gelu_tanh": 1}
"""The activations that `gated` has."""


def gated(
    gate: Float[Array, "rows size"],
    up: Float[Array, "rows size"],
    activation: str,
    num_tokens: Int[Array, " batch"] | None = None,
) -> Float[Array, "rows size"]:
    """`activation(gate) * up`, where the activation is one of `GATES`.

    A number is the same, bit for bit, whatever rows are beside it. For `num_tokens` see `products`;
    padding becomes any numbers.
    """
    call = _call(native.GATE, jax.ShapeDtypeStruct(gate.shape, jnp.float32))
    return call(gate, up, _counts(num_tokens), activation=GATES[activation])


def warp(
    logits: Float[Array, "rows vocab"],
    temperature: Float[Array, " rows"],
    top_k: Int[Array, " rows"],
    top_p: Float[Array, " rows"],
    min_p: Float[Array, " rows"],
    num_tokens: Int[Array, " batch"] | None = None,
) -> Float[Array, "rows vocab"]:
    """Logits of rows to probabilities, in float32; see `sampling.probabilities.warp`.

    A row is the same, bit for bit, whatever rows are beside it. For `num_tokens` see `products`.
    """
    call = _call(native.WARP, jax.ShapeDtypeStruct(logits.shape, jnp.float32))
    return call(logits, temperature, top_k.astype(jnp.int32), top_p, min_p, _counts(num_tokens))


def likeliest(
    logits: Float[Array, "rows vocab"],
    num_tokens: Int[Array, " batch"] | None = None,
    *,
    with_confidence: bool = False,
) -> tuple[Int[Array, " rows"], Float[Array, " confidences"]]:
    """The likeliest tokens of rows in float32; see `sampling.probabilities.likeliest`.

    Args:
      logits: of the rows.
      num_tokens: see `products`; padding becomes -1.
      with_confidence: whether the second result has the confidences, or is empty (static).
    """
    rows = logits.shape[0]
    confidence = jax.ShapeDtypeStruct((rows if with_confidence else 0,), jnp.float32)
    call = _call(native.LIKELIEST, [jax.ShapeDtypeStruct((rows,), jnp.int32), confidence])
    return tuple(call(logits, _counts(num_tokens)))


def draw(
    keys: UInt32[Array, "rows 2"],
    probs: Float[Array, "rows vocab"],
    block: int,
    num_tokens: Int[Array, " batch"] | None = None,
) -> Int[Array, " rows"]:
    """Tokens of rows, drawn like `sampling.draw.draw` does; -1 for a row of zeros.

    Args:
      keys: each row's words for threefry2x32.
      probs: in float32.
      block: tokens of a block of the vocabulary (static).
      num_tokens: see `products`; padding becomes -1.
    """
    call = _call(native.DRAW, jax.ShapeDtypeStruct(probs.shape[:1], jnp.int32))
    return call(keys, probs, _counts(num_tokens), block=block)


def _counts(num_tokens: Int[Array, " batch"] | None) -> Int[Array, " batch"]:
    """`num_tokens` as native code takes it: none means all."""
    return jnp.zeros((0,), jnp.int32) if num_tokens is None else num_tokens


def _call(target: str, result: Any, **options: Any) -> Callable[..., Any]:
    """A function of the library, for programs."""
    if not native.available():
        raise RuntimeError(f"native code is needed and cannot be loaded: {native.description()}")
    return jax.ffi.ffi_call(target, result, **options)
