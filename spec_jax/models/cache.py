"""The key/value cache: a plain pytree, passed in and returned, rolled back by setting a length."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8, Shaped

from spec_jax.kernels import precision_of
from spec_jax.models.config import LayerConfig, TransformerConfig
from spec_jax.sharding import Placement
from spec_jax.sharding.pytree import pytree, static

RING_MULTIPLE = 64
"""Rings are rounded up to it, so that blocks of keys divide them."""


@pytree
class Rounded:
    """Keys or values in 8 bits, each head of each token with a scale of its own.

    What a token keeps depends on nothing but itself, so that scoring sees what decoding wrote.
    """

    values: Int8[Array, "batch kv_heads slots head_dim"]
    scales: Float[Array, "batch kv_heads slots 1"]

    @classmethod
    def of(cls, x: Float[Array, "batch kv_heads slots head_dim"]) -> "Rounded":
        """The nearest of 255 steps; a NaN makes its whole head NaN."""
        scales = jnp.abs(x).max(-1, keepdims=True).astype(jnp.float32) / 127
        steps = jnp.round(x.astype(jnp.float32) / jnp.where(scales == 0, 1.0, scales))
        return cls(jnp.nan_to_num(steps).astype(jnp.int8), scales)

    def widened(self) -> Float[Array, "batch kv_heads slots head_dim"]:
        """The numbers that are meant, in float32."""
        return self.values.astype(jnp.float32) * self.scales

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the array that it stands for."""
        return self.values.shape


Kept = Float[Array, "batch kv_heads slots head_dim"] | Rounded


@pytree
class LayerCache:
    """Keys and values of one layer.

    A token's index counts the tokens written before it in its row. A full layer keeps index i in
    slot i. A ring keeps it in slot i modulo the number of slots, which suffices for a layer that
    sees only a window: with `window + headroom` slots no token that a query sees is overwritten, as
    long as every written index is less than `headroom` past the next query.

    Attributes:
      keys: rotated keys.
      values: values.
      ring: whether indices wrap around; static.
    """

    keys: Kept
    values: Kept
    ring: bool = static(default=False)

    @property
    def slots(self) -> int:
        """KV slots of a row."""
        return self.keys.shape[2]

    @property
    def precision(self) -> jax.lax.Precision | None:
        """The precision to ask for in products with them."""
        return None if isinstance(self.keys, Rounded) else precision_of(self.keys.dtype)

    def write(
        self,
        keys: Float[Array, "batch tokens kv_heads head_dim"],
        values: Float[Array, "batch tokens kv_heads head_dim"],
        start: Int[Array, " batch"],
        num_tokens: Int[Array, " batch"] | None = None,
    ) -> "LayerCache":
        """The cache with new tokens side by side from each row's own index on.

        Of each row only the first `num_tokens` are written, all by default. The caller leaves room
        in a full layer: tokens past its edge are lost.
        """
        new: tuple[Kept, Kept] = keys.swapaxes(1, 2), values.swapaxes(1, 2)
        if isinstance(self.keys, Rounded):
            new = Rounded.of(new[0]), Rounded.of(new[1])
        return self._write(new, start, num_tokens)

    def _write(
        self,
        new: tuple[Kept, Kept],
        start: Int[Array, " batch"],
        num_tokens: Int[Array, " batch"] | None = None,
    ) -> "LayerCache":
        count = new[0].shape[2]
        order = jnp.arange(count, dtype=jnp.int32)[None]
        slots = start[:, None] + order
        if self.ring:
            if count > self.slots:
                raise ValueError(f"{count} tokens do not fit into a ring of {self.slots} slots")
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
    ) -> "LayerCache":
        """Moves the first `num_tokens` of the tokens at indices `sources` side by side to `to`."""
        slots = sources % self.slots if self.ring else sources

        def moved(buffer: Array) -> Array:
            return jnp.take_along_axis(buffer, slots[:, None, :, None], axis=2)

        return self._write(jax.tree.map(moved, (self.keys, self.values)), to, num_tokens)

    def indices(
        self, slots: Int[Array, " some"], end: Int[Array, " batch"]
    ) -> Int[Array, "rows some"]:
        """The index that each slot holds once `end` tokens are written; negative if none does.

        One row for all if the layer is full.
        """
        if not self.ring:
            return slots[None]
        newest = end[:, None] - 1
        return newest - (newest - slots[None]) % self.slots


@pytree
class Encoded:
    """An encoder's output as a decoder's layers see it: the same in every round of a row.

    Attributes:
      layers: keys and values for each layer of the decoder.
      lengths: positions of each row's source.
    """

    layers: tuple[LayerCache, ...]
    lengths: Int[Array, " batch"]


@pytree
class KVCache:
    """The KV cache of all rows: a `LayerCache` for each layer, and the rows' lengths.

    Slots at or past a row's length are never read, so rollback only sets `lengths`, and only the
    loop's commit moves them. The layout [batch, kv_heads, slots, head_dim] lets XLA update rows at
    different indices in place. Every array has one entry a row along its first axis.

    Attributes:
      layers: one cache a layer.
      lengths: valid tokens of each row.
      encoded: what the layers of an encoder-decoder attend to beside the text.
    """

    layers: tuple[LayerCache, ...]
    lengths: Int[Array, " batch"]
    encoded: Encoded | None = None

    @classmethod
    def zeros(
        cls,
        config: TransformerConfig,
        batch: int,
        capacity: int,
        *,
        dtype: DTypeLike,
        headroom: int | None = None,
        placement: Placement = Placement.single_device(),
    ) -> "KVCache":
        """An empty cache.

        Args:
          config: the model's shape.
          batch: rows.
          capacity: tokens that a row has room for.
          dtype: of keys and values; `int8` keeps them as `Rounded`.
          headroom: most tokens ever written past the next query, including padding and tokens that
            are refused later. If given, layers with a window get rings; otherwise all are full.
          placement: how the model lies on devices.
        """

        def state(layer: LayerConfig) -> LayerCache:
            slots = slots_of_layer(layer, capacity, headroom)
            shape = (batch, config.num_kv_heads, slots, config.head_dim)
            axes = ("batch", "kv_heads", "length", None)

            # Zeros, since empty arrays may hold NaN.
            def zeros() -> Kept:
                found = placement.pin(jnp.zeros(shape, dtype), *axes)
                if jnp.dtype(dtype) != jnp.int8:
                    return found
                return Rounded(found, placement.pin(jnp.zeros((*shape[:3], 1), jnp.float32), *axes))

            return LayerCache(zeros(), zeros(), ring=slots < capacity)

        return cls(
            layers=tuple(map(state, config.layers)),
            lengths=placement.pin(jnp.zeros((batch,), jnp.int32), "batch"),
        )

    def gather(
        self,
        sources: Int[Array, "batch moved"],
        to: Int[Array, " batch"],
        num_tokens: Int[Array, " batch"] | None = None,
    ) -> "KVCache":
        """Moves a few tokens of each row side by side to `to`: the branch that a tree keeps."""
        layers = tuple(layer.gather(sources, to, num_tokens) for layer in self.layers)
        return dataclasses.replace(self, layers=layers)

    @property
    def can_truncate(self) -> bool:
        """Whether a row may be cut to any length: a ring has overwritten what is further back."""
        return not any(layer.ring for layer in self.layers)

    def with_lengths(self, lengths: Int[Array, " batch"]) -> "KVCache":
        """The same arrays with other valid lengths: commit and rollback."""
        return dataclasses.replace(self, lengths=lengths)


def slots_of_layer(layer: LayerConfig, capacity: int, headroom: int | None) -> int:
    """KV slots of a row in one layer; arguments as for `KVCache.zeros`."""
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
