"""Logits to probabilities, once for both models, by reductions instead of sorts.

The order and the semantics are Hugging Face transformers': what `processors` does (bias, penalties,
bans), then temperature, top-k, top-p, min-p. Every step is a reduction over the vocabulary, so the
vocabulary may stay sharded; only top-k and top-p, which need many reductions, exchange the shards
so that each device has complete rows. Steps that no row of the batch uses are not part of the
program (`SamplingFeatures`), or are skipped where that is faster (`Placement.skips_unused`). A step
does not change a row that does not use it, bit for bit, so a row's tokens do not depend on its
neighbours' parameters.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from spec_jax.kernels import native, native_calls
from spec_jax.sampling.draw import blocks, draw, largest
from spec_jax.sampling.parameters import BatchSampling
from spec_jax.sampling.processors import History, TokenSets, process
from spec_jax.sharding import Placement


def probabilities(
    logits: Float[Array, "batch positions vocab"],
    sampling: BatchSampling,
    history: History,
    following: Int[Array, "batch drafted"],
    ancestors: Bool[Array | np.ndarray, "positions drafted"] | None = None,
    allowed: TokenSets | None = None,
    placement: Placement = Placement.single_device(),
    num_tokens: Int[Array, " batch"] | None = None,
) -> Float[Array, "batch positions vocab"]:
    """The distributions that tokens are drawn from, at several query positions of each row.

    Args:
      logits: float32 logits at each query position.
      sampling: each row's parameters.
      history: the tokens of each row up to its first query position.
      following: the tokens drafted after the first position; the processors at later positions
        see the tokens before them.
      ancestors: the tokens of `following` that each position follows, in the order of their index;
        None for all earlier ones. For a tree it is the path to each position.
      allowed: sets of tokens, all others are banned; None bans nothing.
      placement: of the model that computed the logits; static.
      num_tokens: how many positions of each row are real; None for all. Native code skips others,
        whose results may be anything.

    Returns:
      Probabilities; one-hot for greedy rows. A position whose logits hold a NaN, or whose tokens
      are all masked, has no distribution and returns zeros.
    """
    processed = process(logits, sampling, history, following, ancestors, allowed)
    return warp(processed, sampling, placement, num_tokens)


def likeliest(
    logits: Float[Array, "*lead vocab"],
    placement: Placement = Placement.single_device(),
    num_tokens: Int[Array, " batch"] | None = None,
) -> Int[Array, "*lead"]:
    """The token that a greedy row takes from processed logits, or -1 without a distribution.

    It is the token that `warp` gives all probability, without the vocabulary of zeros around it.
    For the arguments see `probabilities`.
    """
    if _is_native(logits, placement):
        flat = logits.reshape(-1, logits.shape[-1])
        return native_calls.likeliest(flat, num_tokens)[0].reshape(logits.shape[:-1])
    return jnp.where(_has_distribution(logits), largest(logits), -1)


def likeliest_with_confidence(
    logits: Float[Array, "*lead vocab"], placement: Placement = Placement.single_device()
) -> tuple[Int[Array, "*lead"], Float[Array, "*lead"]]:
    """`likeliest`, and the token's probability at temperature 1; 0 without a distribution."""
    if _is_native(logits, placement):
        flat = logits.reshape(-1, logits.shape[-1])
        both = native_calls.likeliest(flat, with_confidence=True)
        return both[0].reshape(logits.shape[:-1]), both[1].reshape(logits.shape[:-1])
    tokens = likeliest(logits, placement)
    confidence = jnp.exp(logits.max(-1) - jax.nn.logsumexp(logits, axis=-1))
    return tokens, jnp.where(tokens >= 0, confidence, 0.0)


def draw_tokens(
    keys: Key[Array, "batch positions"],
    probs: Float[Array, "batch positions vocab"],
    placement: Placement = Placement.single_device(),
    num_tokens: Int[Array, " batch"] | None = None,
) -> Int[Array, "batch positions"]:
    """A token of each distribution, see `draw`; -1 where there is none.

    For the arguments see `probabilities`.
    """
    if _is_native(probs, placement):
        vocab = probs.shape[-1]
        words = jax.random.key_data(keys).reshape(-1, 2)
        tokens = native_calls.draw(words, probs.reshape(-1, vocab), blocks(vocab)[1], num_tokens)
        return tokens.reshape(keys.shape)
    tokens = jax.vmap(draw, in_axes=1, out_axes=1)(keys, probs)
    return jnp.where(probs.sum(-1) > 0, tokens, -1)


def warp(
    logits: Float[Array, "batch positions vocab"],
    sampling: BatchSampling,
    placement: Placement = Placement.single_device(),
    num_tokens: Int[Array, " batch"] | None = None,
) -> Float[Array, "batch positions vocab"]:
    """Processed logits to probabilities: temperature, truncation, softmax; see `probabilities`."""
    rows = _Parameters(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    random = sampling.features.random
    if random and _is_native(logits, placement):
        flat = logits.reshape(-1, logits.shape[-1])
        parameters = (jnp.repeat(each, logits.shape[1]) for each in rows)
        return native_calls.warp(flat, *parameters, num_tokens=num_tokens).reshape(logits.shape)
    cuts = _Cuts.of(rows, sampling.skips_unused) if sampling.features.cut else None
    shards = placement.num_shards("vocab")
    if cuts is None or shards == 1 or logits.shape[-1] % shards:
        return _warp(logits, _Parameters(*(each[:, None, None] for each in rows)), random, cuts)

    # Each device of the vocabulary's shards gets some complete rows, with one all-to-all each way.
    # The 32 reductions of a cut, which would each be an exchange between all devices, are local.
    batch, positions, _ = logits.shape
    parts = placement.num_shards("batch")
    size = batch // parts * positions

    def to_rows(values: Array, last_axis: str | None) -> Array:
        values = values.reshape(parts, size, -1)
        values = jnp.pad(values, ((0, 0), (0, -size % shards), (0, 0)))
        values = placement.pin(values, "batch", None, last_axis)
        return placement.pin(values, "batch", "vocab", None)

    each_position = (jnp.repeat(each[:, None], positions, axis=1) for each in rows)
    parameters = _Parameters(*(to_rows(each, None) for each in each_position))
    probs = _warp(to_rows(logits, "vocab"), parameters, random, cuts)
    probs = placement.pin(probs, "batch", "vocab", None)
    probs = placement.pin(probs, "batch", None, "vocab")[:, :size]
    return placement.pin(probs.reshape(logits.shape), "batch", None, "vocab")


def _is_native(logits: Array, placement: Placement) -> bool:
    """Whether native code computes the distributions: 32 reductions of a cut are slow on CPUs."""
    is_single = placement.mesh is None and placement.platform == "cpu"
    return is_single and logits.dtype == jnp.float32 and native.available()


class _Parameters(NamedTuple):
    """Sampling parameters, with a last axis of length 1 beside the vocabulary."""

    temperature: Float[Array, "*#lead 1"]
    top_k: Int[Array, "*#lead 1"]
    top_p: Float[Array, "*#lead 1"]
    min_p: Float[Array, "*#lead 1"]


class _Cuts(NamedTuple):
    """Whether some row of the batch has each cut; otherwise it is skipped."""

    top_k: Bool[Array, ""] | bool
    top_p: Bool[Array, ""] | bool
    min_p: Bool[Array, ""] | bool

    @classmethod
    def of(cls, rows: _Parameters, skip: bool) -> "_Cuts":
        """The cuts of these rows; all, if nothing is to be skipped."""
        uses = rows.top_k > 0, rows.top_p < 1, rows.min_p > 0
        return cls(*(each.any() if skip else True for each in uses))


def _warp(
    logits: Float[Array, "*lead vocab"], rows: _Parameters, random: bool, cuts: _Cuts | None
) -> Float[Array, "*lead vocab"]:
    """Logits of complete rows to probabilities.

    Args:
      logits: of the rows.
      rows: the parameters of each row.
      random: whether some row draws at random.
      cuts: of the random rows; None if the program has none.
    """
    greedy = jax.nn.one_hot(largest(logits), logits.shape[-1], dtype=logits.dtype)
    probs = greedy
    if random:
        probs = jnp.where(rows.temperature == 0, greedy, _softened(logits, rows, cuts))
    return jnp.where(_has_distribution(logits)[..., None], probs, 0.0)


def _has_distribution(logits: Float[Array, "*lead vocab"]) -> Bool[Array, "*lead"]:
    """Whether some logit is finite, and none is a NaN or positive infinity."""
    # XLA's maximum on CPUs passes over a NaN in long rows. One reduction, over devices too.
    return jnp.isfinite(jnp.where(jnp.isnan(logits), jnp.inf, logits).max(-1))


def _softened(
    logits: Float[Array, "*lead vocab"], rows: _Parameters, cuts: _Cuts | None
) -> Float[Array, "*lead vocab"]:
    """Temperature, top-k, top-p, min-p, softmax; nobody uses the result of a greedy row."""
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)
    best = logits.max(-1, keepdims=True)

    def softmax(logits: Array) -> Array:
        # The best token's quotient is 0 and not infinite, however small the temperature. The number
        # that the softmax subtracts is 0 too, so that fusing the two does not change the rounding.
        return jax.nn.softmax((logits - best) / temperature, -1)

    # The cuts mask the logits and not the quotients, which have the same order but are rounded.
    def top_k(logits: Array) -> Array:
        limit = jnp.where(rows.top_k > 0, rows.top_k, logits.shape[-1])
        return _keep_top(logits, jnp.ones_like(logits), limit.astype(logits.dtype))

    def top_p(logits: Array) -> Array:
        truncated = _keep_top(logits, softmax(logits), rows.top_p)
        # At 1 nothing may be dropped, whatever the rounding of the sum.
        return jnp.where(rows.top_p < 1, truncated, logits)

    def min_p(logits: Array) -> Array:
        probs = softmax(logits)
        return jnp.where(probs < rows.min_p * probs.max(-1, keepdims=True), -jnp.inf, logits)

    if cuts is not None:
        for used, cut in zip(cuts, (top_k, top_p, min_p), strict=True):
            logits = jax.lax.cond(used, cut, lambda x: x, logits)
    return softmax(logits)


def _keep_top(
    logits: Float[Array, "*lead vocab"],
    weights: Float[Array, "*lead vocab"],
    limit: Float[Array, "*#lead 1"],
) -> Float[Array, "*lead vocab"]:
    """Masks every logit for which the weights of the larger logits sum up to `limit` or more.

    The cut is found by bisection over the ordered bit patterns of floats: 32 (64) reductions and
    no sort, exact to the last bit; of equal logits at the cut all stay.
    """
    order = _ordered_bits(logits)
    info = jnp.iinfo(order.dtype)
    shape = (*logits.shape[:-1], 1)
    bound = limit.astype(logits.dtype)

    def halve(_, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        # The mean of two signed integers, rounded down, without overflow.
        middle = (low & high) + ((low ^ high) >> 1)
        above = jnp.where(order > middle, weights, 0.0).sum(-1, keepdims=True)
        # A bound that is too small for the float type still keeps the largest logit.
        enough = (above < bound) | (above == 0)
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    start = jnp.full(shape, info.min, order.dtype), jnp.full(shape, info.max, order.dtype)
    cut, _ = jax.lax.fori_loop(0, info.bits, halve, start)
    return jnp.where(order >= cut, logits, -jnp.inf)


def _ordered_bits(x: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Integers that compare like the floats (-0 counts as 0)."""
    integer = jnp.int64 if x.dtype == jnp.float64 else jnp.int32
    bits = jax.lax.bitcast_convert_type(x, integer)
    return jnp.where(bits < 0, jnp.iinfo(integer).min - bits, bits)
