"""Logits to probabilities, once for both models, by reductions instead of sorts.

The order and semantics are those of Hugging Face transformers' logits processors: bias,
repetition penalty, temperature, top-k, top-p, min-p; presence and frequency penalties follow the
OpenAI API, after the repetition penalty. Every step is a reduction over the vocabulary, so the
vocabulary may stay sharded. A step that no row of the batch uses is skipped on device; a row that
does not use a step passes through it bit for bit, so a row's tokens do not depend on its
neighbours' parameters.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from spec_jax.config import SamplingParams
from spec_jax.pytree import pytree


@pytree
class BatchSampling:
    """The `SamplingParams` of each row as arrays; dynamic under jit."""

    temperature: Float[Array, " batch"]
    top_k: Int[Array, " batch"]
    top_p: Float[Array, " batch"]
    min_p: Float[Array, " batch"]
    repetition_penalty: Float[Array, " batch"]
    presence_penalty: Float[Array, " batch"]
    frequency_penalty: Float[Array, " batch"]
    logit_bias: Float[Array, "batch vocab"]

    @classmethod
    def stack(cls, rows: Sequence[SamplingParams], vocab_size: int) -> "BatchSampling":
        """One array entry per request."""

        def column(name: str, dtype: type) -> Array:
            return jnp.asarray(np.array([getattr(row, name) for row in rows], dtype))

        bias = np.zeros((len(rows), vocab_size), np.float32)
        for i, row in enumerate(rows):
            for token, value in row.logit_bias.items():
                bias[i, token] = value
        return cls(
            temperature=column("temperature", np.float32),
            # A top_k past the vocabulary keeps all of it, however large the number.
            top_k=jnp.asarray(np.array([min(row.top_k, vocab_size) for row in rows], np.int32)),
            top_p=column("top_p", np.float32),
            min_p=column("min_p", np.float32),
            repetition_penalty=column("repetition_penalty", np.float32),
            presence_penalty=column("presence_penalty", np.float32),
            frequency_penalty=column("frequency_penalty", np.float32),
            logit_bias=jnp.asarray(bias),
        )

    def repeat(self, times: int) -> "BatchSampling":
        """Each row's parameters `times` times in succession."""
        return jax.tree.map(lambda each: jnp.repeat(each, times, axis=0), self)

    @property
    def random(self) -> Bool[Array, ""]:
        """Whether any row draws at random; the others are greedy."""
        return (self.temperature > 0).any()

    @property
    def uses_history(self) -> Bool[Array, ""]:
        """Whether any row's penalties look at the tokens before."""
        off = (
            (self.repetition_penalty == 1)
            & (self.presence_penalty == 0)
            & (self.frequency_penalty == 0)
        )
        return (~off).any()


@pytree
class TokenCounts:
    """How often each token stands in the prompt and among the generated tokens."""

    prompt: Int[Array, "batch vocab"]
    generated: Int[Array, "batch vocab"]

    @classmethod
    def of(
        cls,
        tokens: Int[Array, "batch length"],
        lengths: Int[Array, " batch"],
        prompt_lengths: Int[Array, " batch"],
        sampling: BatchSampling,
    ) -> "TokenCounts":
        """Counts the rows' tokens; zeros if no row's penalties look at them."""
        shape = sampling.logit_bias.shape

        def count() -> tuple[Array, Array]:
            places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
            in_prompt = places < prompt_lengths[:, None]
            generated = ~in_prompt & (places < lengths[:, None])
            rows = jnp.arange(shape[0], dtype=jnp.int32)[:, None]
            zeros = jnp.zeros(shape, jnp.int32)
            return (
                zeros.at[rows, tokens].add(in_prompt.astype(jnp.int32)),
                zeros.at[rows, tokens].add(generated.astype(jnp.int32)),
            )

        def none() -> tuple[Array, Array]:
            return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.int32)

        return cls(*jax.lax.cond(sampling.uses_history, count, none))

    def repeat(self, times: int) -> "TokenCounts":
        """Each row's counts `times` times in succession."""
        return jax.tree.map(lambda each: jnp.repeat(each, times, axis=0), self)

    def add(self, tokens: Int[Array, " batch"]) -> "TokenCounts":
        """One more generated token in each row."""
        # Compared, not scattered: for a scatter the partitioner gathers counts that are sharded.
        ids = jnp.arange(self.generated.shape[1], dtype=jnp.int32)
        drawn = (ids[None] == tokens[:, None]).astype(jnp.int32)
        return dataclasses.replace(self, generated=self.generated + drawn)


def probabilities(
    logits: Float[Array, "batch places vocab"],
    sampling: BatchSampling,
    counts: TokenCounts,
    following: Int[Array, "batch places_but_one"],
) -> Float[Array, "batch places vocab"]:
    """The distributions that tokens are drawn from, at several places of each row.

    Args:
      logits: float32 logits after each place.
      sampling: each row's parameters.
      counts: tokens of each row up to its first place.
      following: the token that stands after each place but the last; penalties at a later place
        count them too.

    Returns:
      Probabilities; one-hot for greedy rows. A place whose logits hold a NaN, or whose tokens are
      all masked, has no distribution and returns zeros.
    """
    logits = logits + sampling.logit_bias[:, None]
    logits = jax.lax.cond(
        sampling.uses_history,
        lambda: _penalise(logits, sampling, counts, following),
        lambda: logits,
    )
    best = logits.max(-1, keepdims=True)
    greedy = jax.nn.one_hot(jnp.argmax(logits, -1), logits.shape[-1], dtype=logits.dtype)

    def warp() -> Array:
        is_greedy = (sampling.temperature == 0)[:, None, None]
        return jnp.where(is_greedy, greedy, _warp(logits, sampling))

    probs = jax.lax.cond(sampling.random, warp, lambda: greedy)
    return jnp.where(jnp.isfinite(best), probs, 0.0)


def _penalise(
    logits: Float[Array, "batch places vocab"],
    sampling: BatchSampling,
    counts: TokenCounts,
    following: Int[Array, "batch places_but_one"],
) -> Float[Array, "batch places vocab"]:
    batch, places, vocab = logits.shape
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    steps = jnp.arange(1, places, dtype=jnp.int32)[None]
    later = jnp.zeros((batch, places, vocab), jnp.int32).at[rows, steps, following].add(1)
    generated = counts.generated[:, None] + jnp.cumsum(later, axis=1)
    seen = (counts.prompt[:, None] + generated) > 0

    repetition = sampling.repetition_penalty[:, None, None]
    penalised = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen & (repetition != 1), penalised, logits)
    presence = sampling.presence_penalty[:, None, None]
    frequency = sampling.frequency_penalty[:, None, None]
    logits = logits - presence * (generated > 0).astype(logits.dtype)
    return logits - frequency * generated.astype(logits.dtype)


def _warp(
    logits: Float[Array, "batch places vocab"], sampling: BatchSampling
) -> Float[Array, "batch places vocab"]:
    """Temperature, top-k, top-p, min-p, softmax. Rows of temperature 0 pass through it unused."""
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    logits = logits / temperature[:, None, None]

    def top_k() -> Array:
        limit = jnp.where(sampling.top_k > 0, sampling.top_k, logits.shape[-1])
        return _keep_top(logits, jnp.ones_like(logits), limit.astype(logits.dtype))

    def top_p() -> Array:
        kept = _keep_top(logits, jax.nn.softmax(logits, -1), sampling.top_p)
        # At 1 nothing may be dropped, whatever the rounding of the sum.
        return jnp.where((sampling.top_p < 1)[:, None, None], kept, logits)

    def min_p() -> Array:
        probs = jax.nn.softmax(logits, -1)
        floor = sampling.min_p[:, None, None] * probs.max(-1, keepdims=True)
        return jnp.where(probs < floor, -jnp.inf, logits)

    logits = jax.lax.cond((sampling.top_k > 0).any(), top_k, lambda: logits)
    logits = jax.lax.cond((sampling.top_p < 1).any(), top_p, lambda: logits)
    logits = jax.lax.cond((sampling.min_p > 0).any(), min_p, lambda: logits)
    return jax.nn.softmax(logits, -1)


def _keep_top(
    logits: Float[Array, "batch places vocab"],
    weights: Float[Array, "batch places vocab"],
    limit: Float[Array, " batch"],
) -> Float[Array, "batch places vocab"]:
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


def draw(
    keys: Key[Array, " batch"], probs: Float[Array, "batch vocab"], random: Bool[Array, ""]
) -> Int[Array, " batch"]:
    """One token per row by the Gumbel-max trick, which needs no sum along the vocabulary.

    `random` false says that every row is one-hot, so that no random number need be made.
    """

    def race() -> Array:
        gumbel = jax.vmap(lambda key: jax.random.gumbel(key, probs.shape[1:], probs.dtype))(keys)
        return jnp.argmax(jnp.log(probs) + gumbel, -1)

    return jax.lax.cond(random, race, lambda: jnp.argmax(probs, -1)).astype(jnp.int32)
