"""Logits to probabilities, once for both models, by reductions instead of sorts.

The order and semantics are those of Hugging Face transformers' logits processors: what
`processors` does (bias, penalties, bans), then temperature, top-k, top-p, min-p. Every step is a
reduction over the vocabulary, so the vocabulary may stay sharded; only for the many reductions of
top-k and top-p are whole rows brought together, on as many devices as there are shards. What no row
of the batch uses is not part of the program (`SamplingFeatures`), or is skipped where that is
faster (`Placement.skips_unused`). A row that does not use a step passes through it bit for bit, so
a row's tokens do not depend on its neighbours' parameters.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32, UInt32

from spec_jax.sampling.draw import largest
from spec_jax.sampling.parameters import BatchSampling
from spec_jax.sampling.processors import History, process
from spec_jax.sharding import Placement


def probabilities(
    logits: Float[Array, "batch positions vocab"],
    sampling: BatchSampling,
    history: History,
    following: Int[Array, "batch drafted"],
    ancestors: Bool[Array | np.ndarray, "positions drafted"] | None = None,
    allowed: UInt32[Array, "batch positions words"]
    | Int32[Array, "batch positions words"]
    | None = None,
    placement: Placement = Placement.single_device(),
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
      placement: of the model that the logits are from; static.

    Returns:
      Probabilities; one-hot for greedy rows. A position whose logits hold a NaN, or whose tokens
      are all masked, has no distribution and returns zeros.
    """
    processed = process(logits, sampling, history, following, ancestors, allowed)
    return warp(processed, sampling, placement)


def warp(
    logits: Float[Array, "batch positions vocab"],
    sampling: BatchSampling,
    placement: Placement = Placement.single_device(),
) -> Float[Array, "batch positions vocab"]:
    """Processed logits to probabilities: temperature, truncation, softmax; as `probabilities`."""
    own = _Parameters(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    random = sampling.features.random
    cuts = _Cuts.of(own, sampling.skips_unused) if sampling.features.cut else None
    shards = placement.num_shards("vocab")
    if cuts is None or shards == 1 or logits.shape[-1] % shards:
        each_row = (each[:, None, None] for each in own)
        return _warp(logits, _Parameters(*each_row), random, cuts)
    rows = _Rows(placement, *logits.shape[:2])
    each_row = (jnp.repeat(each[:, None], logits.shape[1], axis=1)[..., None] for each in own)
    parameters = _Parameters(*map(rows.of_rows, each_row))
    return rows.back(_warp(rows.whole(logits), parameters, random, cuts))


class _Parameters(NamedTuple):
    """Sampling parameters, with a last axis of length 1 beside the vocabulary."""

    temperature: Float[Array, "*#lead 1"]
    top_k: Int[Array, "*#lead 1"]
    top_p: Float[Array, "*#lead 1"]
    min_p: Float[Array, "*#lead 1"]


class _Cuts(NamedTuple):
    """Whether a row of the batch has each cut; if not, it is skipped."""

    top_k: Bool[Array, ""] | bool
    top_p: Bool[Array, ""] | bool
    min_p: Bool[Array, ""] | bool

    @classmethod
    def of(cls, rows: _Parameters, skip: bool) -> "_Cuts":
        """What these rows have; all, if nothing is to be skipped."""
        uses = rows.top_k > 0, rows.top_p < 1, rows.min_p > 0
        return cls(*(each.any() if skip else True for each in uses))


class _Rows:
    """Moves a sharded vocabulary so that each of its shards' devices holds some rows whole.

    There and back are an all-to-all each, of as many bytes as a device holds. In between, the 32
    reductions of a cut, which would each be an exchange between all devices, are its own.

    Args:
      placement: of the logits.
      batch: rows.
      positions: of each row.
    """

    def __init__(self, placement: Placement, batch: int, positions: int):
        self._placement, self._shape = placement, (batch, positions)
        self._parts = placement.num_shards("batch")
        self._size = batch // self._parts * positions
        shards = placement.num_shards("vocab")
        self._padding = -self._size % shards

    def whole(
        self, logits: Float[Array, "batch positions vocab"]
    ) -> Float[Array, "parts rows vocab"]:
        """Rows of logits, sharded over the devices of the vocabulary."""
        rows = self._placement.pin(self.pad(logits), "batch", None, "vocab")
        return self._placement.pin(rows, "batch", "vocab", None)

    def back(
        self, probs: Float[Array, "parts rows vocab"]
    ) -> Float[Array, "batch positions vocab"]:
        """Rows of a sharded vocabulary."""
        probs = self._placement.pin(probs, "batch", "vocab", None)
        probs = self._placement.pin(probs, "batch", None, "vocab")[:, : self._size]
        return self._placement.pin(probs.reshape(*self._shape, -1), "batch", None, "vocab")

    def of_rows(self, values: Array) -> Array:
        """A value of each row beside it."""
        values = self._placement.pin(self.pad(values), "batch", None, None)
        return self._placement.pin(values, "batch", "vocab", None)

    def pad(self, rows: Array) -> Array:
        """Of each part of the batch all positions of all rows, and as many more as make it even."""
        rows = rows.reshape(self._parts, self._size, -1)
        return jnp.pad(rows, ((0, 0), (0, self._padding), (0, 0)))


def _warp(
    logits: Float[Array, "*lead vocab"], own: _Parameters, random: bool, cuts: _Cuts | None
) -> Float[Array, "*lead vocab"]:
    """Logits of whole rows to probabilities.

    Args:
      logits: of rows.
      own: parameters of each row.
      random: whether any row draws at random.
      cuts: those of random rows; None if the program holds none.
    """
    best = logits.max(-1, keepdims=True)
    greedy = jax.nn.one_hot(largest(logits), logits.shape[-1], dtype=logits.dtype)
    probs = greedy
    if random:
        probs = jnp.where(own.temperature == 0, greedy, _softened(logits, own, cuts))
    return jnp.where(jnp.isfinite(best), probs, 0.0)


def _softened(
    logits: Float[Array, "*lead vocab"], own: _Parameters, cuts: _Cuts | None
) -> Float[Array, "*lead vocab"]:
    """Temperature, top-k, top-p, min-p, softmax. Rows of temperature 0 pass through it unused."""
    temperature = jnp.where(own.temperature > 0, own.temperature, 1.0)
    best = logits.max(-1, keepdims=True)

    def softmax(logits: Array) -> Array:
        # The best token's quotient is 0 and not infinite, however small the temperature; and what
        # the softmax subtracts is 0 too, so that no compiler rounds the two otherwise when fused.
        return jax.nn.softmax((logits - best) / temperature, -1)

    # The cuts mask the logits as they are: of equal order, and free of the quotient's rounding.
    def top_k(logits: Array) -> Array:
        limit = jnp.where(own.top_k > 0, own.top_k, logits.shape[-1])
        return _keep_top(logits, jnp.ones_like(logits), limit.astype(logits.dtype))

    def top_p(logits: Array) -> Array:
        kept = _keep_top(logits, softmax(logits), own.top_p)
        # At 1 nothing may be dropped, whatever the rounding of the sum.
        return jnp.where(own.top_p < 1, kept, logits)

    def min_p(logits: Array) -> Array:
        probs = softmax(logits)
        return jnp.where(probs < own.min_p * probs.max(-1, keepdims=True), -jnp.inf, logits)

    if cuts is not None:
        for used, cut in zip(cuts, (top_k, top_p, min_p), strict=True):
            logits = jax.lax.cond(used, cut, lambda x: x, logits)
    return softmax(logits)


def _keep_top(
    logits: Float[Array, "*lead vocab"],
    weights: Float[Array, "*lead vocab"],
    limit: Float[Array, "*#lead 1"],
) -> Float[Array, "*lead vocab"]:
    """Masks every logit above which tokens of `limit` total weight stand already.

    The cut is found by bisection over the ordered bit patterns of floats: 32 (64) reductions and
    no sort, exact to the last bit, ties at the cut kept together.
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
