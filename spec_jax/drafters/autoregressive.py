"""Drafting token by token, for every drafter that is a language model."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax.decoding.control import in_place_if
from spec_jax.decoding.sampling import TokenCounts, draw, probabilities
from spec_jax.drafters.base import Context, Draft

T = TypeVar("T")
Step = Callable[[T, int | Array, Int[Array, "batch drafts"]], tuple[Array, T]]


def autoregress(
    step: Step, carry: T, context: Context, *, lookahead: int, drafts: int = 1
) -> tuple[Draft, T]:
    """Draws tokens one after another, each from the model's own processed distribution.

    Where the lookahead varies, a row stops at its limit or after a token of which the model is
    less confident than the row's threshold, and the loop ends when all rows have stopped; rows
    that have stopped are read along, and what they write must not be counted. Otherwise the loop
    has a fixed length, which accelerators run without asking the host.

    Args:
      step: (carry, i, tokens drawn in step i - 1) -> logits [batch, drafts, target's vocab] of
        the i-th tokens, and the carry. `i` is the Python number 0 in the first step, whose tokens
        mean nothing.
      carry: what the steps update in place, such as a cache.
      context: the rows.
      lookahead: most tokens to draft; static.
      drafts: drafts of each row; static.
    """
    batch = context.lengths.shape[0]
    rows, vocab = batch * drafts, context.sampling.logit_bias.shape[1]
    sampling, random = context.sampling.repeat(drafts), context.sampling.random
    counts = TokenCounts.of(
        context.tokens, context.lengths, context.prompt_lengths, context.sampling
    ).repeat(drafts)
    limits = jnp.full((batch,), lookahead, jnp.int32) if context.limits is None else context.limits
    nothing = jnp.zeros((rows, 0), jnp.int32)

    def one(i: int | Array, state):
        carry, counts, last, tokens, probs, lengths, active = state
        logits, carry = step(carry, i, last)
        q = probabilities(logits.reshape(rows, 1, vocab), sampling, counts, nothing)[:, 0]
        places = (i * drafts + jnp.arange(drafts, dtype=jnp.int32))[None]
        keys = jax.vmap(lambda key: jax.vmap(lambda at: jax.random.fold_in(key, at))(places[0]))(
            context.keys
        )
        drawn = draw(keys.reshape(rows), q, random)
        counts = counts.add(drawn)
        q, last = q.reshape(batch, drafts, vocab), drawn.reshape(batch, drafts)
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, last, i * drafts, axis=1)
        probs = jax.lax.dynamic_update_slice_in_dim(probs, q, i * drafts, axis=1)
        # A place without a distribution (NaN) ends the draft before it; the target goes on.
        usable = (q.sum(-1) > 0).all(-1)
        active = active & usable
        lengths = lengths + active.astype(jnp.int32)
        if context.threshold is not None:
            confidence = jnp.take_along_axis(q, last[..., None], axis=2)[..., 0].max(-1)
            active = active & (confidence >= context.threshold)
        return carry, counts, last, tokens, probs, lengths, active & (lengths < limits)

    state = (
        carry,
        counts,
        jnp.zeros((batch, drafts), jnp.int32),
        jnp.zeros((batch, lookahead * drafts), jnp.int32),
        jnp.zeros((batch, lookahead * drafts, vocab), jnp.float32),
        jnp.zeros((batch,), jnp.int32),
        limits > 0,
    )
    if context.limits is None:
        state = jax.lax.fori_loop(1, lookahead, one, one(0, state))
    else:
        state = in_place_if(state[-1].any(), lambda state: one(0, state), state)
        _, state = jax.lax.while_loop(
            lambda each: (each[0] < lookahead) & each[1][-1].any(),
            lambda each: (each[0] + 1, one(each[0], each[1])),
            (jnp.int32(1), state),
        )
    carry, _, _, tokens, probs, lengths, _ = state
    return Draft(tokens=tokens, probs=probs, lengths=lengths, drafts=drafts), carry
