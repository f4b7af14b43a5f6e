"""Rows of a batch: trees of arrays whose leading axis is the batch."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def insert_rows(state: Any, slots: Int[Array, "shards inserted"], rows: Any) -> Any:
    """Writes rows into slots of a state of the same structure; donate the state.

    A shard of the batch takes rows of the same shard alone, so that nothing travels between
    devices: of B slots and R rows on S shards, shard s holds slots s * B / S and following, and
    rows s * R / S and following.

    Args:
      state: arrays of B entries each along axis 0.
      slots: for each row the slot that it takes, counted within its shard; a row whose slot is
        B / S or more is not inserted.
      rows: arrays of R entries each. Shorter entries than the state's replace their begins.

    Returns:
      The state with the rows in their slots; all others are as they were.
    """
    shards, count = slots.shape

    def insert(leaf: Array, new: Array) -> Array:
        sharded = leaf.reshape(shards, len(leaf) // shards, *leaf.shape[1:])
        new = new.reshape(shards, count, *new.shape[1:])
        begin = tuple(map(slice, new.shape[2:])) if new.shape[2:] != leaf.shape[1:] else ()

        # Row by row: XLA:CPU copies an array that a scatter of several rows overwrites.
        @jax.vmap
        def write(mine: Array, at: Array, new: Array) -> Array:
            return mine.at[(at, *begin)].set(new, mode="drop")

        def put(i: Array, mine: Array) -> Array:
            return write(mine, slots[:, i], new[:, i])

        return jax.lax.fori_loop(0, count, put, sharded).reshape(leaf.shape)

    return jax.tree.map(insert, state, rows)


def take_rows(state: Any, slots: Int[Array, "shards taken"]) -> Any:
    """Copies of rows of a state.

    Args:
      state: see `insert_rows`.
      slots: the slot of each copied row, counted within its shard.
    """
    shards, count = slots.shape

    def take(leaf: Array) -> Array:
        sharded = leaf.reshape(shards, len(leaf) // shards, *leaf.shape[1:])
        rows = jax.vmap(lambda mine, at: jnp.take(mine, at, axis=0, mode="clip"))(sharded, slots)
        return rows.reshape(shards * count, *leaf.shape[1:])

    return jax.tree.map(take, state)


def lengthened_rows(rows: Any, like: Any) -> Any:
    """Rows with zeros at the ends of their arrays, so that each has as much room as in `like`.

    Args:
      rows: arrays of one entry a row.
      like: arrays, or their shapes, whose entries are as long or longer; the structure of the
        result is theirs.
    """

    def lengthen(leaf: Array, like: Any) -> Array:
        more = [(0, b - a) for a, b in zip(leaf.shape[1:], like.shape[1:], strict=True)]
        return jnp.pad(leaf, [(0, 0), *more]) if any(b for _, b in more) else leaf

    pairs = zip(jax.tree.leaves(rows), jax.tree.leaves(like), strict=True)
    return jax.tree.unflatten(jax.tree.structure(like), [lengthen(*pair) for pair in pairs])


def broadcast_rows(rows: Any, shards: int, batch: int) -> Any:
    """A state of `batch` entries along axis 0, as `insert_rows` takes it: copies of some rows.

    Args:
      rows: arrays whose leading axis is the rows; a shard copies its own first one.
      shards: of the batch.
      batch: entries, a multiple of the shards.
    """

    def fill(leaf: Array) -> Array:
        first = leaf.reshape(shards, len(leaf) // shards, *leaf.shape[1:])[:, :1]
        return jnp.repeat(first, batch // shards, axis=1).reshape(batch, *leaf.shape[1:])

    return jax.tree.map(fill, rows)


def write_rows(rows: Any, new: Any, at: Int[Array, " batch"]) -> Any:
    """Each row of every array with new entries from its own index on, along axis 1."""

    def write(row: Array, new: Array, at: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(row, new, at, axis=0)

    return jax.tree.map(lambda rows, new: jax.vmap(write)(rows, new, at), rows, new)
