"""Reading known text into a cache, a block of tokens at a time."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax.models.cache import KVCache
from spec_jax.models.model import Model
from spec_jax.models.output import TargetOutput


def prefill(
    model: Model,
    tokens: Int[Array, "batch length"],
    end: Int[Array, " batch"],
    cache: KVCache,
    block: int,
) -> KVCache:
    """Reads each row's tokens from its cache's length up to `end`; a row that has them is left.

    Args:
      model: the model that reads.
      tokens: the rows' texts, left-aligned.
      end: how many tokens of each row the cache shall hold.
      cache: what is read already.
      block: tokens per call of the model; static.
    """

    def read(_: Array, cache: KVCache) -> KVCache:
        return read_block(model, tokens, end, cache, block).cache

    return jax.lax.fori_loop(0, blocks_left(end, cache, block), read, cache)


def blocks_left(end: Int[Array, " batch"], cache: KVCache, block: int) -> Int[Array, ""]:
    """How many blocks the row with the most unread tokens has."""
    return (jnp.maximum(end - cache.lengths, 0).max() + block - 1) // block


def read_block(
    model: Model,
    tokens: Int[Array, "batch length"],
    end: Int[Array, " batch"],
    cache: KVCache,
    block: int,
    feature_layers: tuple[int, ...] = (),
) -> TargetOutput:
    """Reads the next block of each row, as `prefill` does; the cache's lengths count it."""
    start = cache.lengths
    num_tokens = jnp.clip(end - start, 0, block)
    out = model.prefill(take_tokens(tokens, start, block), cache, num_tokens, feature_layers)
    return out._replace(cache=out.cache.commit(start + num_tokens))


def take_tokens(
    tokens: Int[Array, "batch length"], start: Int[Array, " batch"], count: int
) -> Int[Array, "batch count"]:
    """`count` (static) tokens of each row from its `start` on; past the end the last one."""
    at = start[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    return jnp.take_along_axis(tokens, jnp.clip(at, 0, tokens.shape[1] - 1), axis=1)
