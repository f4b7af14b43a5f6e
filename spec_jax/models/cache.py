"""The key/value cache: a plain pytree, passed in and returned, rolled back by setting a length."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax.sharding.pytree import pytree

T = TypeVar("T")


@pytree
class KVCache:
    """One key and one value array per layer, and how many entries of each row are valid.

    Entries at or past a row's length are never read, so rollback only sets `lengths`, and only
    the loop's commit moves them. The layout [batch, kv_heads, length, head_dim] lets XLA update
    rows at different positions in place.

    Attributes:
      keys: rotated keys, one array a layer.
      values: values, one array a layer.
      lengths: valid entries of each row.
    """

    keys: tuple[Float[Array, "batch kv_heads length head_dim"], ...]
    values: tuple[Float[Array, "batch kv_heads length head_dim"], ...]
    lengths: Int[Array, " batch"]

    @classmethod
    def zeros(
        cls, *, num_layers: int, batch: int, num_kv_heads: int, capacity: int, head_dim: int, dtype
    ) -> "KVCache":
        """An empty cache for `capacity` tokens a row."""
        shape = (batch, num_kv_heads, capacity, head_dim)
        return cls(
            keys=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
            values=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
            lengths=jnp.zeros((batch,), jnp.int32),
        )

    @property
    def capacity(self) -> int:
        """Entries a row can hold."""
        return self.keys[0].shape[2]

    def gather(self, sources: Int[Array, "batch moved"], to: Int[Array, " batch"]) -> "KVCache":
        """Moves a few entries of each row side by side to `to`: the branch that a tree keeps."""

        def move(buffer: Array) -> Array:
            kept = jnp.take_along_axis(buffer, sources[:, None, :, None], axis=2)
            return write_rows(buffer, kept, to)

        return dataclasses.replace(
            self,
            keys=tuple(move(each) for each in self.keys),
            values=tuple(move(each) for each in self.values),
        )

    def with_lengths(self, lengths: Int[Array, " batch"]) -> "KVCache":
        """The same arrays with other valid lengths: commit and rollback."""
        return dataclasses.replace(self, lengths=lengths)


@pytree
class Places:
    """Where new tokens stand and which cache entries they may see.

    New tokens are written side by side from each row's cache length on, whatever their positions.
    An entry below that length stands at the position of its index.

    Attributes:
      positions: of each new token in its text.
      visible: the cache entries that each new token sees, its own included.
    """

    positions: Int[Array, "batch tokens"]
    visible: Bool[Array, "batch tokens length"]

    @classmethod
    def following(cls, cache: KVCache, count: int) -> "Places":
        """`count` tokens that continue each row's text one after another."""
        positions = cache.lengths[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
        entries = jnp.arange(cache.capacity, dtype=jnp.int32)
        return cls(positions, entries[None, None] <= positions[..., None])


def write_rows(
    buffer: Float[Array, "batch kv_heads length head_dim"],
    new: Float[Array, "batch kv_heads tokens head_dim"],
    start: Int[Array, " batch"],
) -> Float[Array, "batch kv_heads length head_dim"]:
    """Writes each row's new entries at that row's own start.

    The caller leaves room: `dynamic_update_slice` would clamp a start past the edge and
    overwrite valid entries.
    """

    def write_row(row, new_row, row_start):
        return jax.lax.dynamic_update_slice_in_dim(row, new_row, row_start, axis=1)

    return jax.vmap(write_row)(buffer, new.astype(buffer.dtype), start)


def prefill(
    extend: Callable[[Int[Array, "batch block"], KVCache], KVCache],
    tokens: Int[Array, "batch length"],
    lengths: Int[Array, " batch"],
    cache: KVCache,
    block: int,
) -> KVCache:
    """Reads all but the last token of each row into the cache, `block` tokens at a time.

    The last token is what the first round scores, so a prompt needs no logits. Rows shorter than
    the longest write entries past their length, which are never read.

    Args:
      extend: writes the cache entries of a block of tokens.
      tokens: the prompts, left-aligned; `block` divides their padded length.
      lengths: tokens of each prompt.
      cache: an empty cache.
      block: tokens per call of `extend`; static.
    """

    def read(start: Array, piece: Array, cache: KVCache) -> KVCache:
        return extend(piece, cache.with_lengths(jnp.full_like(lengths, start)))

    return by_blocks(read, tokens, lengths, cache, block).with_lengths(jnp.maximum(lengths - 1, 0))


def by_blocks(
    read: Callable[[Array, Int[Array, "batch block"], T], T],
    tokens: Int[Array, "batch length"],
    lengths: Int[Array, " batch"],
    carry: T,
    block: int,
) -> T:
    """`read(start, tokens, carry)` for each block of prompts until all but their last are read.

    Arguments as for `prefill`.
    """
    if tokens.shape[1] % block:
        raise ValueError(f"block {block} does not divide the padded length {tokens.shape[1]}")

    def read_block(i: Array, carry: T) -> T:
        piece = jax.lax.dynamic_slice_in_dim(tokens, i * block, block, axis=1)
        return read(i * block, piece, carry)

    blocks = (jnp.maximum(lengths - 1, 0).max() + block - 1) // block
    return jax.lax.fori_loop(0, blocks, read_block, carry)
