"""Reading prompts into caches, a block of tokens at a time."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax.models.cache import KVCache

T = TypeVar("T")


def prefill(
    extend: Callable[[Int[Array, "batch block"], KVCache], KVCache],
    tokens: Int[Array, "batch length"],
    lengths: Int[Array, " batch"],
    cache: KVCache,
    block: int,
) -> KVCache:
    """Reads all but the last token of each row into the cache, `block` tokens at a time.

    The last token is what the first round scores, so a prompt needs no logits.

    Args:
      extend: writes keys and values of a block of tokens.
      tokens: the prompts, left-aligned; `block` divides their padded length.
      lengths: tokens of each prompt.
      cache: an empty cache.
      block: tokens per call of `extend`; static.
    """

    def read(start: Array, piece: Array, cache: KVCache) -> KVCache:
        return extend(piece, cache.with_lengths(start))

    return by_blocks(read, tokens, lengths, cache, block).with_lengths(jnp.maximum(lengths - 1, 0))


def by_blocks(
    read: Callable[[Int[Array, " batch"], Int[Array, "batch block"], T], T],
    tokens: Int[Array, "batch length"],
    lengths: Int[Array, " batch"],
    carry: T,
    block: int,
) -> T:
    """`read(starts, tokens, carry)` for each block, until all but the rows' last tokens are read.

    A row that is already read gets its last block again, so that no row writes more than a block
    past its length: otherwise a ring would lose tokens that the row still sees. Arguments as for
    `prefill`.
    """
    if tokens.shape[1] % block:
        raise ValueError(f"block {block} does not divide the padded length {tokens.shape[1]}")
    wanted = jnp.maximum(lengths - 1, 0)
    last = jnp.maximum(wanted - 1, 0) // block

    def read_block(i: Array, carry: T) -> T:
        starts = jnp.minimum(i, last) * block
        slices = jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, block))
        return read(starts, slices(tokens, starts), carry)

    return jax.lax.fori_loop(0, (wanted.max() + block - 1) // block, read_block, carry)
