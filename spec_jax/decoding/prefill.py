"""Rows before their first round: they start, compute their prompts, and enter a running batch.

A row has computed as many tokens as its cache is long. Prefill computes all but the last token of
the prompt, block by block, and the first round scores that one in front of its draft.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from spec_jax.control import in_place_if
from spec_jax.decoding.draft_length import DraftLengthPolicy
from spec_jax.decoding.logprobs import Logprobs, logprobs_of
from spec_jax.decoding.rows import broadcast_rows, insert_rows, lengthened_rows
from spec_jax.decoding.state import LENGTH, RUNNING, Counters, DecodeState
from spec_jax.drafters.base import Drafter, DrafterPrompt, PromptBlock
from spec_jax.models.cache import KVState
from spec_jax.models.model import Model
from spec_jax.models.prefill import blocks_left, read_block
from spec_jax.models.source import EncoderInput

LOGITS_AT_ONCE = 32
"""Tokens of a prompt whose logits are in memory at once; it divides every block."""


def start(
    target: Model,
    drafter: Drafter,
    policy: DraftLengthPolicy,
    *,
    tokens: Int[Array, "batch length"],
    lengths: Int[Array, " batch"],
    max_lengths: Int[Array, " batch"],
    keys: UInt32[Array, "batch 2"],
    may_draft: Bool[Array, " batch"],
    predictions: Int[Array, "batch 2"] | None = None,
    block: int,
    headroom: int | None = None,
    inputs: Any = None,
    source: EncoderInput | None = None,
    logprobs: int | None = None,
) -> DecodeState:
    """The state of rows with prompts of which nothing is computed yet.

    Args:
      target: the target model.
      drafter: the batch's drafter.
      policy: its draft-length policy.
      tokens: the prompts, left-aligned.
      lengths: tokens of each prompt.
      max_lengths: where each row must end; a row that is as long already starts finished.
      keys: each row's PRNG key data.
      may_draft: the rows whose prompts the drafter reads, see `DecodeState`.
      predictions: see `DrafterPrompt`.
      block: tokens of a prompt that a call computes; static.
      headroom: the largest number of KV slots that a call writes past a row's text, see `KVCache`;
        static.
      inputs: the inputs that the drafter's host side has made, if it has one.
      source: the encoder's input, for a target that has an encoder.
      logprobs: how many of the likeliest tokens are recorded beside each token, with their
        log-probabilities; None records none. Static.
    """
    batch, length = tokens.shape
    cache = target.new_cache(batch, length, headroom=headroom)
    if source is not None:
        encoded, source = target.encode(source)
        cache = dataclasses.replace(cache, encoded=encoded)
    return DecodeState(
        tokens=tokens,
        lengths=lengths,
        prompt_lengths=lengths + 0,  # donated buffers must not be shared
        max_lengths=max_lengths,
        finish=jnp.where(lengths < max_lengths, RUNNING, LENGTH).astype(jnp.int32),
        keys=keys,
        may_draft=may_draft,
        cache=cache,
        drafter=drafter.init(DrafterPrompt(tokens, lengths, inputs, source, block, predictions)),
        draft_length=policy.init(batch),
        counters=Counters.zeros(batch, drafter.lookahead, length),
        logprobs=None if logprobs is None else Logprobs.zeros(batch, length, logprobs),
    )


@jax.named_scope("prefill")
def prefill(
    target: Model, drafter: Drafter, state: DecodeState, block: int, prompt_logprobs: bool = False
) -> DecodeState:
    """Computes the prompts to their ends; for the arguments see `prefill_step`."""
    end, begin = state.lengths - 1, state.cache.lengths
    steps = blocks_left(end, state.cache, block)
    if drafter.feature_layers:

        def step(_: Array, state: DecodeState) -> DecodeState:
            return prefill_step(target, drafter, state, block, prompt_logprobs)

        return jax.lax.fori_loop(0, steps, step, state)

    # One model after the other: in one loop the compiler would keep the temporaries of both.
    def read(_: Array, state: DecodeState) -> DecodeState:
        return _read_block(target, drafter, state, block, prompt_logprobs)[0]

    def draft(i: Array, drafter_state: Any) -> Any:
        start = jnp.minimum(begin + i * block, end)
        num_tokens = jnp.clip(end - start, 0, block)
        each = PromptBlock(state.tokens, state.lengths, start, num_tokens, None, block)
        return drafter.prefill(drafter_state, each)

    done = jax.lax.fori_loop(0, steps, read, state)
    if drafter.can_skip_prompts:
        steps = jnp.where(state.may_draft.any(), steps, 0)
    return dataclasses.replace(done, drafter=jax.lax.fori_loop(0, steps, draft, state.drafter))


def prefill_step(
    target: Model, drafter: Drafter, state: DecodeState, block: int, prompt_logprobs: bool = False
) -> DecodeState:
    """Computes the next block of each prompt that is not complete.

    Args:
      target: the target model.
      drafter: the drafter, which gets each block after the target has computed it.
      state: rows before their first round.
      block: tokens of a row that are computed; static.
      prompt_logprobs: whether log-probabilities of the prompts' tokens are recorded; static.
    """
    state, read = _read_block(target, drafter, state, block, prompt_logprobs)

    def draft(drafter_state: Any) -> Any:
        return drafter.prefill(drafter_state, read)

    if drafter.can_skip_prompts:
        drafted = in_place_if(state.may_draft.any(), draft, state.drafter)
    else:
        drafted = draft(state.drafter)
    return dataclasses.replace(state, drafter=drafted)


def _read_block(
    target: Model, drafter: Drafter, state: DecodeState, block: int, prompt_logprobs: bool
) -> tuple[DecodeState, PromptBlock]:
    """The target computes the next block of each prompt, which the drafter then gets."""
    begin, layers = state.cache.lengths, drafter.feature_layers
    if prompt_logprobs:
        layers = (*layers, target.config.num_layers)
    out = read_block(target, state.tokens, state.lengths - 1, state.cache, block, layers)
    num_tokens, features, logprobs = out.cache.lengths - begin, out.features, state.logprobs
    if prompt_logprobs and features is not None and logprobs is not None:
        logprobs = _add(target, logprobs, state.tokens, features[:, :, -1], begin, num_tokens)
        features = features[:, :, :-1] if drafter.feature_layers else None
    read = PromptBlock(state.tokens, state.lengths, begin, num_tokens, features, block)
    return dataclasses.replace(state, cache=out.cache, logprobs=logprobs), read


def _add(
    target: Model,
    logprobs: Logprobs,
    tokens: Int[Array, "batch length"],
    hidden: Float[Array, "batch block embed"],
    begin: Int[Array, " batch"],
    num_tokens: Int[Array, " batch"],
) -> Logprobs:
    """Adds the log-probability of the token after each of a block's tokens."""
    top, length = logprobs.top.shape[-1], tokens.shape[1]

    def some(i: Array, logprobs: Logprobs) -> Logprobs:
        piece = jax.lax.dynamic_slice_in_dim(hidden, i * LOGITS_AT_ONCE, LOGITS_AT_ONCE, axis=1)
        order = i * LOGITS_AT_ONCE + jnp.arange(LOGITS_AT_ONCE, dtype=jnp.int32)[None]
        places = begin[:, None] + order + 1
        token_ids = jnp.take_along_axis(tokens, jnp.minimum(places, length - 1), axis=1)
        new = logprobs_of(target.logits(piece), token_ids, top)
        places = jnp.where(order < num_tokens[:, None], places, length)
        write = jax.vmap(lambda row, new, at: row.at[at].set(new, mode="drop"))
        return jax.tree.map(lambda rows, new: write(rows, new, places), logprobs, new)

    return jax.lax.fori_loop(0, hidden.shape[1] // LOGITS_AT_ONCE, some, logprobs)


def copy_prefix(
    drafter: Drafter, state: DecodeState, other: DecodeState, num_tokens: Int[Array, " batch"]
) -> DecodeState:
    """Rows that begin with tokens that other rows have computed, so that prefill can skip these.

    It needs `drafter.copies_prefixes`. Log-probabilities of the copied tokens are not recorded.

    Args:
      drafter: the batch's drafter.
      state: the rows, as `start` made them.
      other: the rows to copy from, of the same number and shapes: row i for row i. States that can
        be truncated may be longer.
      num_tokens: how many tokens of each row are copied; 0 copies none. Both texts agree in these
        and in the next one, since a drafter may read a token's features with the token after it.
        The last two tokens of a prompt are always computed. If `not other.cache.can_truncate`, a
        row copies all that the other row has computed, or nothing.
    """
    cache, of_drafter = other.cache, other.drafter
    if other.tokens.shape[1] > state.tokens.shape[1]:
        cache = _shortened(cache, dataclasses.replace(state.cache, encoded=cache.encoded))
        of_drafter = _shortened(of_drafter, state.drafter)
    computed = cache.lengths
    num_tokens = jnp.minimum(jnp.minimum(num_tokens, computed), jnp.maximum(state.lengths - 2, 0))
    if not cache.can_truncate:
        num_tokens = jnp.where(num_tokens == computed, num_tokens, 0)
    cache = dataclasses.replace(cache, lengths=num_tokens, encoded=state.cache.encoded)
    copied = drafter.copy_prefix(state.drafter, of_drafter, num_tokens)
    return dataclasses.replace(state, cache=cache, drafter=copied)


def _shortened(rows: Any, like: Any) -> Any:
    """Rows without the ends of their arrays, each as long as in `like`."""

    def shorten(leaf: Array, like: Array) -> Array:
        return leaf[(slice(None), *(slice(size) for size in like.shape[1:]))]

    pairs = zip(jax.tree.leaves(rows), jax.tree.leaves(like), strict=True)
    return jax.tree.unflatten(jax.tree.structure(rows), [shorten(*pair) for pair in pairs])


def empty_batch(
    policy: DraftLengthPolicy, rows: DecodeState, shards: int, batch: int
) -> DecodeState:
    """A state of `batch` free slots, into which rows are inserted.

    Args:
      policy: the draft-length policy.
      rows: rows of the batch's shapes; a free slot is one of them, finished.
      shards: of the batch; static.
      batch: slots; static.
    """
    filled = broadcast_rows(dataclasses.replace(rows, draft_length=None), shards, batch)
    ones = [jnp.ones((batch,), jnp.int32) for _ in range(3)]  # donated: none may be shared
    return dataclasses.replace(
        filled,
        draft_length=policy.init(batch),
        lengths=ones[0],
        prompt_lengths=ones[1],
        max_lengths=ones[2],
        finish=jnp.full((batch,), LENGTH, jnp.int32),
        cache=filled.cache.with_lengths(jnp.zeros((batch,), jnp.int32)),
    )


def insert(
    policy: DraftLengthPolicy,
    state: DecodeState,
    slots: Int[Array, "shards inserted"],
    rows: DecodeState,
) -> DecodeState:
    """Puts rows whose prompts are computed into slots of a running state.

    Donate `state`: the rows are written into its buffers. A row's tokens depend neither on when it
    is inserted nor on its slot: its randomness is a function of its key and length.

    Args:
      policy: the batch's draft-length policy.
      state: of at least the capacity of the rows.
      slots: the slot that each row takes, see `insert_rows`.
      rows: the rows.
    """
    draft_length = policy.insert(state.draft_length, slots, rows.draft_length)
    state, rows = (dataclasses.replace(each, draft_length=None) for each in (state, rows))
    if rows.tokens.shape[1] < state.tokens.shape[1]:
        rows = _lengthened_but_keys_and_values(rows, state)
    return dataclasses.replace(insert_rows(state, slots, rows), draft_length=draft_length)


def _lengthened_but_keys_and_values(rows: DecodeState, state: DecodeState) -> DecodeState:
    """Rows with as much room as a state has; nobody reads keys and values past a row's length."""

    def is_kv(part: Any) -> bool:
        return isinstance(part, KVState)

    parts, structure = jax.tree.flatten(rows, is_leaf=is_kv)
    others = jax.tree.leaves(state, is_leaf=is_kv)
    return jax.tree.unflatten(
        structure,
        [
            part if is_kv(part) else lengthened_rows(part, other)
            for part, other in zip(parts, others, strict=True)
        ],
    )
