"""Logits to probabilities, once for both models, by reductions instead of sorts.

The order and semantics are those of Hugging Face transformers' logits processors: what
`processors` does (bias, penalties, bans), then temperature, top-k, top-p, min-p. Every step is a
reduction over the vocabulary, so the vocabulary may stay sharded. A step that no row of the batch
uses is no part of the program (`SamplingFeatures`); a row that does not use a step passes through
it bit for bit, so a row's tokens do not depend on its neighbours' parameters.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32, UInt32

from spec_jax.sampling.draw import largest
from spec_jax.sampling.parameters import BatchSampling
from spec_jax.sampling.processors import History, process


def probabilities(
    logits: Float[Array, "batch positions vocab"],
    sampling: BatchSampling,
    history: History,
    following: Int[Array, "batch drafted"],
    ancestors: Bool[Array | np.ndarray, "positions drafted"] | None = None,
    allowed: UInt32[Array, "batch positions words"]
    | Int32[Array, "batch positions words"]
    | None = None,
) -> Float[Array, "batch positions vocab"]:
    """The distributions that tokens are drawn from, at several query positions of each row.

    Args:
      logits: float32 logits at each query position.
      sampling: each row's parameters.
      history: tokens of each row up to its first query position.
      following: the tokens drafted after the first position; the processors at later positions
        see the tokens before them.
      ancestors: which of `following` each position follows, in the order of their index; all
        earlier ones if None. For a tree it is the path to each position.
      allowed: packed sets of tokens, all others banned: token i is bit i % 32 of word i // 32,
        and ids past the last word are banned too. None bans nothing.

    Returns:
      Probabilities; one-hot for greedy rows. A position whose logits hold a NaN, or whose tokens
      are all masked, has no distribution and returns zeros.
    """
    return warp(process(logits, sampling, history, following, ancestors, allowed), sampling)


def warp(
    logits: Float[Array, "batch positions vocab"], sampling: BatchSampling
) -> Float[Array, "batch positions vocab"]:
    """Processed logits to probabilities: temperature, truncation, softmax; as `probabilities`."""
    best = logits.max(-1, keepdims=True)
    greedy = jax.nn.one_hot(largest(logits), logits.shape[-1], dtype=logits.dtype)

    probs = greedy
    if sampling.features.random:
        is_greedy = (sampling.temperature == 0)[:, None, None]
        probs = jnp.where(is_greedy, greedy, _warp(logits, sampling))
    return jnp.where(jnp.isfinite(best), probs, 0.0)


def _warp(
    logits: Float[Array, "batch positions vocab"], sampling: BatchSampling
) -> Float[Array, "batch positions vocab"]:
    """Temperature, top-k, top-p, min-p, softmax. Rows of temperature 0 pass through it unused."""
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)[:, None, None]
    best = logits.max(-1, keepdims=True)

    def softmax(logits: Array) -> Array:
        # The best token's quotient is 0 and not infinite, however small the temperature; and what
        # the softmax subtracts is 0 too, so that no compiler rounds the two otherwise when fused.
        return jax.nn.softmax((logits - best) / temperature, -1)

    # The cuts mask the logits as they are: of equal order, and free of the quotient's rounding.
    if sampling.features.top_k:
        limit = jnp.where(sampling.top_k > 0, sampling.top_k, logits.shape[-1])
        logits = _keep_top(logits, jnp.ones_like(logits), limit.astype(logits.dtype))
    if sampling.features.top_p:
        kept = _keep_top(logits, softmax(logits), sampling.top_p)
        # At 1 nothing may be dropped, whatever the rounding of the sum.
        logits = jnp.where((sampling.top_p < 1)[:, None, None], kept, logits)
        probs = softmax(logits)
        floor = sampling.min_p[:, None, None] * probs.max(-1, keepdims=True)
        logits = jnp.where(probs < floor, -jnp.inf, logits)
    return softmax(logits)


def _keep_top(
    logits: Float[Array, "batch positions vocab"],
    weights: Float[Array, "batch positions vocab"],
    limit: Float[Array, " batch"],
) -> Float[Array, "batch positions vocab"]:
    """Masks every logit above which tokens of `limit` total weight stand already.

    The cut is found by bisection over the ordered bit patterns of floats: 32 (64) reductions and
    no sort, exact to the last bit, ties at the cut kept together.
    """
    order = _ordered_bits(logits)
    info = jnp.iinfo(order.dtype)
    shape = (*logits.shape[:-1], 1)
    bound = limit.astype(logits.dtype)[:, None, None]

    def halve(_, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        # The mean of two signed integers, rounded down, without overflow.
        middle = (low & high) + ((low ^ high) >> 1)
        above = jnp.where(order > middle, weights, 0.0).sum(-1, keepdims=True)
        # A bound too small for the float type still keeps what nothing stands above.
        enough = (above < bound) | (above == 0)
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    start = jnp.full(shape, info.min, order.dtype), jnp.full(shape, info.max, order.dtype)
    cut, _ = jax.lax.fori_loop(0, info.bits, halve, start)
    return jnp.where(order >= cut, logits, -jnp.inf)


def _ordered_bits(x: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Integers that compare as the floats do (-0 counts as 0)."""
    integer = jnp.int64 if x.dtype == jnp.float64 else jnp.int32
    bits = jax.lax.bitcast_convert_type(x, integer)
    return jnp.where(bits < 0, jnp.iinfo(integer).min - bits, bits)
