"""Drafting token by token, for every drafter that is a language model."""

from collections.abc import Callable
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax.control import in_place_if
from spec_jax.drafters.base import Context, Draft
from spec_jax.pytree import pytree
from spec_jax.sampling.probabilities import (
    draw_tokens,
    likeliest,
    likeliest_with_confidence,
    warp,
)
from spec_jax.sampling.processors import History, process
from spec_jax.sharding import Placement

T = TypeVar("T")


@pytree
class _Drafting(Generic[T]):
    """The state of the steps; arrays of `rows` have an entry for each draft of each row."""

    carry: T
    history: History
    last: Int[Array, " rows"]
    tokens: Int[Array, "batch drafted"]
    probs: Float[Array, "batch drafted vocab"] | None
    confidence: Float[Array, "batch drafted"] | None
    survival: Float[Array, " batch"]
    lengths: Int[Array, " batch"]
    active: Bool[Array, " batch"]


Step = Callable[[T, int | Array, Int[Array, "batch drafts"]], tuple[Array, T]]


def autoregress(
    step: Step,
    carry: T,
    context: Context,
    *,
    lookahead: int,
    num_drafts: int = 1,
    placement: Placement = Placement.single_device(),
    first_differs: bool = True,
) -> tuple[Draft, T]:
    """Draws tokens one after another, each from the model's own processed distribution.

    A row stops at its limit, or after a token with which its confidence, or its survival, is below
    what the context asks for. The loop ends when all rows have stopped, or after K steps if
    `context.fixed_length`. Rows that have stopped are still computed, and the KV slots that they
    write must not be counted.

    Args:
      step: (carry, i, tokens drawn in step i - 1) -> logits [batch, drafts, target's vocab] of
        the i-th tokens, and the carry. The tokens of the first step mean nothing.
      carry: arrays that the steps update in place, such as a cache.
      context: the rows.
      lookahead: the largest number of tokens to draft; static.
      num_drafts: drafts of each row; static.
      placement: of the model that computes the logits; static.
      first_differs: whether the first step is compiled apart, and gets `i` as the Python number 0;
        static.
    """
    batch = context.lengths.shape[0]
    rows, vocab = batch * num_drafts, context.sampling.logit_bias.shape[1]
    sampling, random = context.sampling.repeat(num_drafts), context.sampling.features.random
    reports_probs = random and context.target_keys is None
    history = History.of(
        context.tokens, context.lengths, context.prompt_lengths, context.sampling
    ).repeat(num_drafts)
    no_tokens = jnp.zeros((rows, 0), jnp.int32)

    def write(buffer: Array, new: Array, i: int | Array) -> Array:
        new = new.reshape(batch, num_drafts, *buffer.shape[2:])
        return jax.lax.dynamic_update_slice_in_dim(buffer, new, i * num_drafts, axis=1)

    def one(i: int | Array, state: _Drafting[T]) -> _Drafting[T]:
        logits, carry = step(state.carry, i, state.last.reshape(batch, num_drafts))
        logits = logits.reshape(rows, 1, vocab)
        logits = process(logits, sampling, state.history, no_tokens)
        confidence, survival = state.confidence, state.survival
        probs = new = None
        if confidence is not None:
            token, new = likeliest_with_confidence(logits[:, 0], placement)
        else:
            token = likeliest(logits[:, 0], placement)
        if random:
            q = warp(logits, sampling, placement)
            probs = None if state.probs is None else write(state.probs, q, i)
            keys = context.token_keys(i, num_drafts)
            token = draw_tokens(keys.reshape(rows, 1), q, placement)[:, 0]
            if new is not None:  # rows that sample: the probability of the token that they draw
                drawn = jnp.take_along_axis(q[:, 0], jnp.maximum(token, 0)[:, None], axis=1)[:, 0]
                new = jnp.where(sampling.temperature == 0, new, drawn)
        last, usable = jnp.maximum(token, 0), token >= 0
        # A position without a distribution (NaN) ends the draft before it; the target continues.
        usable = usable.reshape(batch, num_drafts).all(-1)
        lengths = state.lengths + (state.active & usable).astype(jnp.int32)
        active = state.active & usable & (lengths < context.limits)
        if confidence is not None and new is not None:
            best = new.reshape(batch, num_drafts).max(-1)
            confidence, survival = write(confidence, new, i), survival * best
            if context.threshold is not None:
                active = active & (best >= context.threshold)
            if context.least_survival is not None:
                active = active & (survival >= context.least_survival)
        return _Drafting(
            carry=carry,
            history=state.history.add(last),
            last=last,
            tokens=write(state.tokens, last, i),
            probs=probs,
            confidence=confidence,
            survival=survival,
            lengths=lengths,
            active=active,
        )

    knows = context.threshold is not None or context.least_survival is not None
    count = lookahead * num_drafts
    state = _Drafting(
        carry=carry,
        history=history,
        last=jnp.zeros((rows,), jnp.int32),
        tokens=jnp.zeros((batch, count), jnp.int32),
        probs=jnp.zeros((batch, count, vocab), jnp.float32) if reports_probs else None,
        confidence=jnp.zeros((batch, count), jnp.float32) if knows else None,
        survival=jnp.ones((batch,), jnp.float32),
        lengths=jnp.zeros((batch,), jnp.int32),
        active=context.limits > 0,
    )
    begin = 1 if first_differs else 0
    if first_differs:
        if context.fixed_length:
            state = one(0, state)
        else:
            state = in_place_if(state.active.any(), lambda state: one(0, state), state)
    if context.fixed_length:
        state = jax.lax.fori_loop(begin, lookahead, one, state)
    else:
        _, state = jax.lax.while_loop(
            lambda each: (each[0] < lookahead) & each[1].active.any(),
            lambda each: (each[0] + 1, one(each[0], each[1])),
            (jnp.int32(begin), state),
        )
    draft = Draft(
        tokens=state.tokens,
        probs=state.probs,
        lengths=state.lengths,
        num_drafts=num_drafts,
        confidence=state.confidence,
    )
    return draft, state.carry
