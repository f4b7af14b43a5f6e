"""The states of layers: plain pytrees, passed in and returned; lengths roll them back."""

import dataclasses
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8, Shaped

from spec_jax.kernels import precision_of
from spec_jax.models.config import LayerConfig, TransformerConfig
from spec_jax.pytree import pytree, static
from spec_jax.sharding import Placement

KV_AXES = ("batch", "kv_heads", "length")
"""The logical axes of keys and values; the numbers of a head are never sharded."""
RING_MULTIPLE = 64
"""Rings are rounded up to it, so that blocks of keys divide them."""


@dataclasses.dataclass(frozen=True)
class StateSize:
    """The size of the states of a batch.

    Attributes:
      batch: rows.
      capacity: tokens that a row has slots for.
      dtype: of the state's arrays; `int8` keeps keys and values as `Int8KV`.
      headroom: how many tokens are written past the next query, at most, counting padding and
        tokens that are rejected later. Without it states hold all tokens; with it, layers with a
        window hold only what that needs.
      placement: how the model lies on devices.
    """

    batch: int
    capacity: int
    dtype: DTypeLike
    headroom: int | None = None
    placement: Placement = Placement.single_device()


@runtime_checkable
class LayerState(Protocol):
    """The state of one layer for all rows, after the tokens that the layer has read: a pytree.

    A layer writes the tokens of a call from the cache's `lengths` on, and only the first
    `num_tokens` of each row. Lengths then move forwards and backwards: a later call starts at any
    index from the last `commit` on, and its tokens replace what was written there. Scoring must
    not advance a state that cannot be rolled back: it writes its inputs beside the state (a tape),
    and `commit` folds the accepted ones into it.

    The state of a row whose call starts at index 0 is empty, whatever was written before. Every
    array has one entry a row along its first axis, so that rows are inserted and copied as in any
    other array. What the layer writes depends on its kind and is not part of the protocol.
    """

    @property
    def can_truncate(self) -> bool:
        """Whether a row may be cut to any length, further back than the last commit too."""
        ...

    def commit(self, lengths: Int[Array, " batch"]) -> "LayerState":
        """The state, told that no later call starts before these indices."""
        ...

    def gather(
        self,
        sources: Int[Array, "batch moved"],
        to: Int[Array, " batch"],
        num_tokens: Int[Array, " batch"] | None = None,
    ) -> "LayerState":
        """Moves the first `num_tokens` of the tokens at indices `sources` side by side to `to`.

        Only kinds that read trees of drafts are asked to, see `mixers.Mixer`.
        """
        ...


@pytree
class Int8KV:
    """Keys or values in 8 bits, with a scale for each head of each token.

    The numbers of a token depend on no other token, so that scoring sees what decoding wrote.
    """

    values: Int8[Array, "batch kv_heads slots head_dim"]
    scales: Float[Array, "batch kv_heads slots 1"]

    @classmethod
    def of(cls, x: Float[Array, "batch kv_heads slots head_dim"]) -> "Int8KV":
        """The nearest of 255 steps; a NaN makes its whole head NaN."""
        scales = jnp.abs(x).max(-1, keepdims=True).astype(jnp.float32) / 127
        steps = jnp.round(x.astype(jnp.float32) / jnp.where(scales == 0, 1.0, scales))
        return cls(jnp.nan_to_num(steps).astype(jnp.int8), scales)

    def to_float32(self) -> Float[Array, "batch kv_heads slots head_dim"]:
        """The numbers that the steps stand for."""
        return self.values.astype(jnp.float32) * self.scales

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array in full precision."""
        return self.values.shape


KVBuffer = Float[Array, "batch kv_heads slots head_dim"] | Int8KV


@pytree
class KVState:
    """Keys and values of one layer, in full, in a ring, or in 8 bits: a `LayerState`.

    Rollback needs nothing but a length, since no query reads an index at or past it. So writing a
    token twice, or past a row's length, is harmless. That is a property of keys and values; nothing
    outside of this class may rely on it.

    A token's index counts the tokens written before it in its row. A full layer keeps index i in
    slot i. A ring keeps it in slot i modulo the number of slots, which suffices for a layer that
    sees only a window: with `window + headroom` slots no token that a query sees is overwritten, as
    long as every written index is less than `headroom` past the next query.

    Attributes:
      keys: rotated keys.
      values: values.
      ring: whether indices wrap around; static.
    """

    keys: KVBuffer
    values: KVBuffer
    ring: bool = static(default=False)

    @classmethod
    def zeros(cls, config: TransformerConfig, layer: LayerConfig, size: StateSize) -> "KVState":
        """Empty slots: a ring for a layer with a window, if it is smaller."""
        slots = slots_of_layer(layer, size.capacity, size.headroom)
        is_ring, shards = slots < size.capacity, size.placement.num_shards("length")
        slots = -(-slots // shards) * shards
        shape = (size.batch, config.num_kv_heads, slots, config.head_dim)
        pin = size.placement.pin

        # Zeros, since empty arrays may hold NaN.
        def zeros() -> KVBuffer:
            buffer = pin(jnp.zeros(shape, size.dtype), *KV_AXES)
            if jnp.dtype(size.dtype) != jnp.int8:
                return buffer
            return Int8KV(buffer, pin(jnp.zeros((*shape[:3], 1), jnp.float32), *KV_AXES))

        return cls(zeros(), zeros(), ring=is_ring)

    @property
    def can_truncate(self) -> bool:
        """Whether a row may be cut to any length: a ring has overwritten what is further back."""
        return not self.ring

    def commit(self, lengths: Int[Array, " batch"]) -> "KVState":
        """The same: no query reads past its own index."""
        return self

    @property
    def slots(self) -> int:
        """KV slots of a row."""
        return self.keys.shape[2]

    @property
    def precision(self) -> jax.lax.Precision | None:
        """The precision of products with them."""
        return None if isinstance(self.keys, Int8KV) else precision_of(self.keys.dtype)

    def check_room(self, count: int) -> None:
        """Raises ValueError if this many tokens, written at once, would overwrite each other."""
        if self.ring and count > self.slots:
            raise ValueError(f"{count} tokens do not fit into a ring of {self.slots} slots")

    def write(
        self,
        keys: Float[Array, "batch tokens kv_heads head_dim"],
        values: Float[Array, "batch tokens kv_heads head_dim"],
        start: Int[Array, " batch"],
        num_tokens: Int[Array, " batch"] | None = None,
    ) -> "KVState":
        """The cache with new tokens side by side from each row's `start` on.

        Of each row only the first `num_tokens` are written, all by default. A full layer drops
        tokens past its last slot.
        """
        new: tuple[KVBuffer, KVBuffer] = keys.swapaxes(1, 2), values.swapaxes(1, 2)
        if isinstance(self.keys, Int8KV):
            new = Int8KV.of(new[0]), Int8KV.of(new[1])
        return self._write(new, start, num_tokens)

    def _write(
        self,
        new: tuple[KVBuffer, KVBuffer],
        start: Int[Array, " batch"],
        num_tokens: Int[Array, " batch"] | None = None,
    ) -> "KVState":
        count = new[0].shape[2]
        order = jnp.arange(count, dtype=jnp.int32)[None]
        slots = start[:, None] + order
        self.check_room(count)
        if self.ring:
            slots = slots % self.slots
        if num_tokens is not None:  # a slot past the end drops the token
            slots = jnp.where(order < num_tokens[:, None], slots, self.slots + order)
        keys, values = jax.tree.map(
            lambda buffer, each: _write(buffer, each, slots), (self.keys, self.values), new
        )
        return dataclasses.replace(self, keys=keys, values=values)

    def gather(
        self,
        sources: Int[Array, "batch moved"],
        to: Int[Array, " batch"],
        num_tokens: Int[Array, " batch"] | None = None,
    ) -> "KVState":
        """Moves the first `num_tokens` of the tokens at indices `sources` side by side to `to`."""
        slots = sources % self.slots if self.ring else sources

        def moved(buffer: Array) -> Array:
            return jnp.take_along_axis(buffer, slots[:, None, :, None], axis=2)

        return self._write(jax.tree.map(moved, (self.keys, self.values)), to, num_tokens)

    def indices(
        self, slots: Int[Array, " some"], end: Int[Array, " batch"], size: int | None = None
    ) -> Int[Array, "rows some"]:
        """The index that each slot holds once `end` tokens are written; negative if none does.

        One row for all if the layer is full. `size` is the number of slots of a ring of which this
        state is a part.
        """
        if not self.ring:
            return slots[None]
        newest = end[:, None] - 1
        return newest - (newest - slots[None]) % (size or self.slots)


@pytree
class CrossAttentionCache:
    """The keys and values of an encoder's output, which stay the same in every round of a row.

    Attributes:
      layers: keys and values for each layer of the decoder.
      lengths: positions of each row's source.
    """

    layers: tuple[KVState, ...]
    lengths: Int[Array, " batch"]


@pytree
class KVCache:
    """The states of all layers, and how many tokens of each row they count.

    Keys and values at or past a row's length are never read. Their layout, [batch, kv_heads, slots,
    head_dim], lets XLA update rows at different indices in place. Every array has one entry a row
    along its first axis.

    Attributes:
      layers: one state a layer, made by its mixer, see `mixers.new_cache`.
      lengths: valid tokens of each row.
      encoded: what the layers of an encoder-decoder attend to, beside the text.
    """

    layers: tuple[LayerState, ...]
    lengths: Int[Array, " batch"]
    encoded: CrossAttentionCache | None = None

    def gather(
        self,
        sources: Int[Array, "batch moved"],
        to: Int[Array, " batch"],
        num_tokens: Int[Array, " batch"] | None = None,
    ) -> "KVCache":
        """Moves a few tokens of each row side by side to `to`: the accepted branch of a tree."""
        layers = tuple(layer.gather(sources, to, num_tokens) for layer in self.layers)
        return dataclasses.replace(self, layers=layers)

    @property
    def can_truncate(self) -> bool:
        """Whether a row may be cut to any length, further back than the last commit too."""
        return all(layer.can_truncate for layer in self.layers)

    def with_lengths(self, lengths: Int[Array, " batch"]) -> "KVCache":
        """The same states with other lengths, which may be rolled back again."""
        return dataclasses.replace(self, lengths=lengths)

    def commit(self, lengths: Int[Array, " batch"]) -> "KVCache":
        """The states after this many tokens, none of which is taken back later."""
        layers = tuple(layer.commit(lengths) for layer in self.layers)
        return dataclasses.replace(self, layers=layers, lengths=lengths)


def slots_of_layer(layer: LayerConfig, capacity: int, headroom: int | None) -> int:
    """KV slots of a row in one layer; see `StateSize` for the arguments."""
    if headroom is None or layer.window is None:
        return capacity
    return min(capacity, -(-(layer.window + headroom) // RING_MULTIPLE) * RING_MULTIPLE)


def _write(
    buffer: Shaped[Array, "batch kv_heads slots size"],
    new: Shaped[Array, "batch kv_heads tokens size"],
    slots: Int[Array, "batch tokens"],
) -> Shaped[Array, "batch kv_heads slots size"]:
    """The buffer with new tokens in their slots, in place."""

    # A dynamic_update_slice for each row would become a loop over the rows on TPU.
    def write_row(row: Array, new: Array, at: Array) -> Array:
        return row.at[:, at].set(new, unique_indices=True, mode="drop")

    return jax.vmap(write_row)(buffer, new.astype(buffer.dtype), slots)
