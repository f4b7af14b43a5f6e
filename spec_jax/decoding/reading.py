"""Reading prompts into the target's cache, with what else is wanted of them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.decoding.logprobs import Logprobs, logprobs_of
from spec_jax.models.cache import KVCache
from spec_jax.models.model import Model
from spec_jax.models.prefill import by_blocks, prefill
from spec_jax.sharding.rows import write_rows

PLACES_AT_ONCE = 32
"""Tokens of a prompt whose logits are in memory at once; it divides every block."""


class Read(NamedTuple):
    """What is kept of the prompts.

    Attributes:
      cache: with all but the last token of each row.
      states: hidden states of the target's last layer at those tokens, if they are kept.
      logprobs: of each token after the first, if they are wanted.
    """

    cache: KVCache
    states: Float[Array, "batch length embed"] | None = None
    logprobs: Logprobs | None = None


def read_prompts(
    target: Model,
    tokens: Int[Array, "batch length"],
    lengths: Int[Array, " batch"],
    cache: KVCache,
    block: int,
    *,
    keep_states: bool,
    logprobs: Logprobs | None,
) -> Read:
    """Reads all but the last token of each row, `block` tokens at a time.

    Args:
      target: the model that reads.
      tokens: the prompts, left-aligned; `block` divides their padded length.
      lengths: tokens of each prompt.
      cache: an empty cache.
      block: tokens per call of the target; static.
      keep_states: whether hidden states are kept; static.
      logprobs: where the log-probabilities of the prompts' tokens go; None if nobody wants them.
    """
    if not keep_states and logprobs is None:
        return Read(
            prefill(lambda *args: target.extend(*args).cache, tokens, lengths, cache, block)
        )

    def read(at: Array, piece: Array, known: Read) -> Read:
        found, cache = target.begin(piece, known.cache.with_lengths(at), target.config.num_layers)
        states, logprobs = known.states, known.logprobs
        if states is not None:
            states = write_rows(states, found.astype(states.dtype), at)
        if logprobs is not None:
            logprobs = _add(target, logprobs, tokens, found, at)
        return Read(cache, states, logprobs)

    states = target.new_states(*tokens.shape) if keep_states else None
    done = by_blocks(read, tokens, lengths, Read(cache, states, logprobs), block)
    return done._replace(cache=done.cache.with_lengths(jnp.maximum(lengths - 1, 0)))


def _add(
    target: Model,
    logprobs: Logprobs,
    tokens: Int[Array, "batch length"],
    states: Float[Array, "batch block embed"],
    at: Int[Array, " batch"],
) -> Logprobs:
    """With what the target says, at a block of tokens that begins at `at`, of each token's next."""
    top, length = logprobs.top.shape[-1], tokens.shape[1]

    def few(i: Array, known: Logprobs) -> Logprobs:
        begin = i * PLACES_AT_ONCE
        piece = jax.lax.dynamic_slice_in_dim(states, begin, PLACES_AT_ONCE, axis=1)
        places = at[:, None] + begin + 1 + jnp.arange(PLACES_AT_ONCE, dtype=jnp.int32)[None]
        said = jnp.take_along_axis(tokens, jnp.minimum(places, length - 1), axis=1)
        found = logprobs_of(target.exit(piece), said, top)
        # The place after the last token of the last block does not exist.
        write = jax.vmap(lambda row, new, at: row.at[at].set(new, mode="drop"))
        return jax.tree.map(lambda rows, new: write(rows, new, places), known, found)

    return jax.lax.fori_loop(0, states.shape[1] // PLACES_AT_ONCE, few, logprobs)
