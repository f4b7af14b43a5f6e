"""Rows that join a running batch: arrays whose leading axis is the batch."""

from typing import Any

import jax
from jaxtyping import Array, Int


def join_rows(state: Any, slots: Int[Array, "shards joining"], rows: Any) -> Any:
    """Writes rows into slots of a state of the same structure; donate the state.

    A shard of the batch takes rows of its own shard alone, so that nothing travels between
    devices: of B slots and R rows on S shards, shard s holds slots s * B / S and following, and
    rows s * R / S and following.

    Args:
      state: arrays of B entries each along axis 0.
      slots: for each row the slot that it takes, counted within its shard; a row whose slot is
        B / S or more joins nothing.
      rows: arrays of R entries each.

    Returns:
      The state with the rows in their slots; all others are as they were.
    """
    shards, joining = slots.shape

    def join(leaf: Array, new: Array) -> Array:
        rest = leaf.shape[1:]
        sharded = leaf.reshape(shards, len(leaf) // shards, *rest)
        new = new.reshape(shards, joining, *rest)
        write = jax.vmap(lambda mine, at, new: mine.at[at].set(new, mode="drop"))
        return write(sharded, slots, new).reshape(leaf.shape)

    return jax.tree.map(join, state, rows)
