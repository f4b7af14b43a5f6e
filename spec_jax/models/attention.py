"""Attention over a cache: the one place where queries meet keys.

`attention(queries, keys, values, cache, mask) -> output, cache`: the cache writes itself, and
the mask says what each query sees, without an array of [batch, tokens, capacity].
`attend` only reads: the output of an encoder, or a sequence that attends to itself.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from spec_jax.models import native_attention
from spec_jax.models.attention_mask import AttentionMask, ScoreOptions
from spec_jax.models.cache import KV_AXES, Int8KV, KVBuffer, KVState
from spec_jax.models.layers import rotate
from spec_jax.sharding import Placement

NATIVE = "native"
MAX_KEY_BLOCK = 256
"""How many keys `blocked` reads at a time, at most. With fewer than 64 it is slow."""
MIN_KEY_BLOCK = 32
MAX_SCORES = 2**19
"""How many scores of a row's key/value head `blocked` computes at a time, at most."""
LARGE_CACHE = 4096
"""From this many slots on, `blocked` keeps the memory of its scores small beside the cache's."""


def attention(
    queries: Float[Array, "batch tokens heads head_dim"],
    keys: Float[Array, "batch tokens kv_heads head_dim"],
    values: Float[Array, "batch tokens kv_heads head_dim"],
    cache: KVState | None,
    mask: AttentionMask,
    scores: ScoreOptions,
    bias: Float[Array, "heads distances"] | None = None,
    *,
    rotation: Float[Array, "2 batch tokens half"] | None = None,
    backend: str | None = None,
    placement: Placement = Placement.single_device(),
) -> tuple[Float[Array, "batch tokens heads head_dim"], KVState]:
    """Grouped-query attention of new tokens over the cache, in float32.

    Args:
      queries: of the new tokens.
      keys: of the new tokens.
      values: of the new tokens.
      cache: the layer's state; None if the tokens see only each other.
      mask: the positions of the new tokens and what they see.
      scores: how scores become weights.
      bias: is added to the scores, see `attend`.
      rotation: how queries and keys are rotated, see `layers.rotate`; by default they are not.
      backend: a name of `BACKENDS`; the fastest by default, see `fastest`.
      placement: how the model lies on devices.

    Returns:
      The weighted values, and the cache with the new tokens.
    """
    if cache is not None and _is_native(backend, cache, bias):
        return native_attention.write_and_attend(
            queries, keys, values, cache, mask, scores, rotation
        )
    if rotation is not None:
        queries, keys = rotate(queries, rotation), rotate(keys, rotation)
    cache = write_kv(keys, values, cache, mask.start, placement, mask.num_tokens)
    out = attend(queries, cache, mask, scores, bias, backend=backend, placement=placement)
    return out, cache


def write_kv(
    keys: Float[Array, "batch tokens kv_heads head_dim"],
    values: Float[Array, "batch tokens kv_heads head_dim"],
    cache: KVState | None,
    start: Int[Array, " batch"] | None = None,
    placement: Placement = Placement.single_device(),
    num_tokens: Int[Array, " batch"] | None = None,
) -> KVState:
    """The cache with new keys and values from index `start` on; without a cache, one of them.

    Of each row only the first `num_tokens` are written, all by default.
    """
    # A NaN value would reach tokens that must not see it, because zero times NaN is NaN. A NaN key
    # has the same effect on exactly the tokens that see it.
    buffer = values if cache is None else cache.values
    stored = values if isinstance(buffer, Int8KV) else values.astype(buffer.dtype)
    broken = ~jnp.isfinite(stored).all(-1, keepdims=True)
    keys, values = jnp.where(broken, jnp.nan, keys), jnp.where(broken, 0.0, values)
    if cache is None or start is None:
        written, axes = KVState(keys.swapaxes(1, 2), values.swapaxes(1, 2)), ("batch", "kv_heads")
    else:
        written, axes = cache.write(keys, values, start, num_tokens), KV_AXES
    return jax.tree.map(lambda each: placement.pin(each, *axes), written)


def attend(
    queries: Float[Array, "batch tokens heads head_dim"],
    cache: KVState,
    mask: AttentionMask,
    scores: ScoreOptions,
    bias: Float[Array, "heads distances"] | None = None,
    *,
    backend: str | None = None,
    placement: Placement = Placement.single_device(),
) -> Float[Array, "batch tokens heads head_dim"]:
    """The weighted values of a cache that holds everything that the queries see.

    See `attention` for the arguments. `bias` [heads, 2 D + 1] is added to the scores by the
    distance from key to query, from -D to D; larger distances take the first or the last (T5).
    """
    if _is_native(backend, cache, bias):
        return native_attention.attend(queries, cache, mask, scores)
    platform = placement.platform
    if backend is None or backend == NATIVE:
        backend = fastest(platform, queries.shape[1], cache.slots)
    batch, tokens, heads, head_dim = queries.shape
    kv_heads = cache.keys.shape[1]
    group = heads // kv_heads
    # The rows of one product are a group's query heads, then its tokens: in this order a group
    # whose heads are sharded over several devices is not moved.
    rows = queries.reshape(batch, tokens, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, kv_heads, group * tokens, head_dim)
    rows = rows / math.sqrt(scores.query_scalar)
    arguments = rows, cache, mask, scores, bias, platform != "gpu"
    shards = placement.num_shards("length")
    if shards > 1 and cache.slots % shards == 0:
        out = _attend_in_parts(*arguments, backend, placement)
    else:
        out = _IN_XLA[backend](*arguments)
    out = out.reshape(batch, kv_heads, group, tokens, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, tokens, heads, head_dim)


def _is_native(backend: str | None, cache: KVState, bias: Array | None) -> bool:
    return backend == NATIVE and bias is None and not isinstance(cache.keys, Int8KV)


def fastest(platform: str, tokens: int, slots: int) -> str:
    """The backend to use, by platform and shape.

    A cache of one block is read in full in any case, and `dense` needs no loop for it. In longer
    caches `blocked` is faster on CPU unless they are nearly full, since it skips the empty slots.
    On GPU and TPU only prompts use `blocked`, to save memory: on GPU a loop of dynamic length asks
    the host in every iteration, and on TPU the compiler changes the layout of a whole cache in
    every draft step (tests/planning/test_tpu.py).
    """
    if slots <= MAX_KEY_BLOCK:
        return "dense"
    return "blocked" if platform == "cpu" or tokens >= 64 else "dense"


def _dense(
    rows: Float[Array, "batch kv_heads rows head_dim"],
    cache: KVState,
    mask: AttentionMask,
    options: ScoreOptions,
    bias: Float[Array, "heads distances"] | None = None,
    zero_unseen: bool = True,
) -> Float[Array, "batch kv_heads rows head_dim"]:
    """The reference: all slots at once."""
    part = _Part(0, cache.slots)
    scores, values = _all_scores(rows, cache, mask, options, bias, zero_unseen, part)
    weights = jax.nn.softmax(scores, axis=-1)
    return _weighted_sum(weights, values, cache.precision)


class _Sums(NamedTuple):
    """A softmax's sums over the keys read so far, relative to the best score among them."""

    best: Float[Array, "batch kv_heads rows"]
    total: Float[Array, "batch kv_heads rows"]
    out: Float[Array, "batch kv_heads rows head_dim"]

    @classmethod
    def empty(cls, rows: Float[Array, "batch kv_heads rows head_dim"]) -> "_Sums":
        zeros = jnp.zeros(rows.shape[:3], jnp.float32)
        return cls(zeros - jnp.inf, zeros, jnp.zeros_like(rows))

    def add(
        self,
        scores: Float[Array, "batch kv_heads rows some"],
        values: Float[Array, "batch kv_heads some head_dim"],
        precision: jax.lax.Precision | None,
    ) -> "_Sums":
        """The sums with more keys."""
        higher = jnp.maximum(self.best, scores.max(-1))
        # Before the first visible key, minus infinity must not be subtracted from itself.
        shift = jnp.where(higher == -jnp.inf, 0.0, higher)
        weights, faded = jnp.exp(scores - shift[..., None]), jnp.exp(self.best - shift)
        added = _weighted_sum(weights, values, precision)
        return _Sums(
            higher, self.total * faded + weights.sum(-1), self.out * faded[..., None] + added
        )

    def of_all(self, axes: tuple[str, ...]) -> "_Sums":
        """The sums over the keys of all devices along these mesh axes."""
        best = jax.lax.pmax(self.best, axes)
        faded = jnp.exp(self.best - jnp.where(best == -jnp.inf, 0.0, best))
        return _Sums(best, *jax.lax.psum((self.total * faded, self.out * faded[..., None]), axes))

    @property
    def output(self) -> Float[Array, "batch kv_heads rows head_dim"]:
        return self.out / self.total[..., None]


def _blocked(
    rows: Float[Array, "batch kv_heads rows head_dim"],
    cache: KVState,
    mask: AttentionMask,
    options: ScoreOptions,
    bias: Float[Array, "heads distances"] | None = None,
    zero_unseen: bool = True,
) -> Float[Array, "batch kv_heads rows head_dim"]:
    """A block of keys at a time, as many as the longest row has, with an online softmax.

    After Rabe and Staats 2021 (arXiv 2112.05682) and FlashAttention (arXiv 2205.14135). The time
    grows with the tokens in use, not with the slots, and no array of [tokens, slots] is made. A
    block that a row does not see leaves the row's sums unchanged, bit for bit.
    """
    return _blocked_sums(rows, cache, mask, options, bias, zero_unseen).output


def _blocked_sums(
    rows: Float[Array, "batch kv_heads rows head_dim"],
    cache: KVState,
    mask: AttentionMask,
    options: ScoreOptions,
    bias: Float[Array, "heads distances"] | None,
    zero_unseen: bool,
    part: "_Part | None" = None,
) -> _Sums:
    """The sums of `_blocked`, over a part of the slots if there is one."""
    part = part or _Part(0, cache.slots)
    count, head_dim = rows.shape[2:]
    max_size = min(MAX_KEY_BLOCK, MAX_SCORES // count)
    if cache.slots >= LARGE_CACHE:
        # A block of scores takes at most half of the memory of the layer's keys.
        max_size = min(max_size, cache.slots * head_dim // 2 // count)
    size = min(cache.slots, 1 << (max(MIN_KEY_BLOCK, max_size).bit_length() - 1))
    end = mask.end
    used = jnp.clip(jnp.minimum(end.max(), part.slots) - part.first, 0, cache.slots)
    first = jnp.int32(0)
    if options.window is not None and not cache.ring:
        begin = mask.positions.min() - options.window + 1 - part.first
        first = jnp.clip(begin, 0, cache.slots) // size

    def read(i: Array, sums: _Sums) -> _Sums:
        # The last block may reach back into the one before it, whose slots count once.
        at = jnp.minimum(i * size, cache.slots - size)
        slots = at + jnp.arange(size, dtype=jnp.int32)
        seen, distance = mask.seen(part.indices(cache, slots, end), options.window)
        seen = seen & (slots >= i * size)[None, None]

        def block(each: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(each, at, size, axis=2)

        keys, values = (
            _to_float32(jax.tree.map(block, each), seen, zero_unseen)
            for each in (cache.keys, cache.values)
        )
        scores = _scores(rows, keys, seen, distance, options, bias, cache.precision)
        return sums.add(scores, values, cache.precision)

    return jax.lax.fori_loop(first, (used + size - 1) // size, read, _Sums.empty(rows))


class _Part(NamedTuple):
    """The slots of a cache that one device holds."""

    first: Int[Array, ""] | int
    slots: int  # of all devices

    def indices(
        self, cache: KVState, slots: Int[Array, " some"], end: Int[Array, " batch"]
    ) -> Int[Array, "rows some"]:
        """The index that each of these slots of the part holds, see `KVState.indices`."""
        return cache.indices(self.first + slots, end, self.slots)


def _attend_in_parts(
    rows: Float[Array, "batch kv_heads rows head_dim"],
    cache: KVState,
    mask: AttentionMask,
    options: ScoreOptions,
    bias: Float[Array, "heads distances"] | None,
    zero_unseen: bool,
    backend: str,
    placement: Placement,
) -> Float[Array, "batch kv_heads rows head_dim"]:
    """Attention over a cache that is cut by length: each device reads its slots for all rows.

    The devices exchange the sums of the softmax, and nothing of the cache (FlashDecoding, Dao et
    al. 2023, over devices; Helix parallelism, arXiv 2507.07120).
    """
    axes = placement.mesh_axes("length")
    sliced = PartitionSpec(None, None, axes)
    sums_of = _blocked_sums if backend == "blocked" else _dense_sums
    slots = cache.slots

    def attend_to_part(
        rows: Array, cache: KVState, mask: AttentionMask, bias: Array | None
    ) -> Array:
        part = _Part(jax.lax.axis_index(axes) * cache.slots, slots)
        return sums_of(rows, cache, mask, options, bias, zero_unseen, part).of_all(axes).output

    return jax.shard_map(
        attend_to_part,
        mesh=placement.mesh,
        in_specs=(PartitionSpec(), sliced, PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec(),
        axis_names={*axes},
        check_vma=False,
    )(rows, cache, mask, bias)


def _dense_sums(
    rows: Float[Array, "batch kv_heads rows head_dim"],
    cache: KVState,
    mask: AttentionMask,
    options: ScoreOptions,
    bias: Float[Array, "heads distances"] | None,
    zero_unseen: bool,
    part: _Part,
) -> _Sums:
    """The sums over all slots of a part at once."""
    scores, values = _all_scores(rows, cache, mask, options, bias, zero_unseen, part)
    return _Sums.empty(rows).add(scores, values, cache.precision)


def _all_scores(
    rows: Float[Array, "batch kv_heads rows head_dim"],
    cache: KVState,
    mask: AttentionMask,
    options: ScoreOptions,
    bias: Float[Array, "heads distances"] | None,
    zero_unseen: bool,
    part: _Part,
) -> tuple[
    Float[Array, "batch kv_heads rows slots"], Float[Array, "batch kv_heads slots head_dim"]
]:
    """The scores of all slots of a part, and their values in float32."""
    slots = jnp.arange(cache.slots, dtype=jnp.int32)
    seen, distance = mask.seen(part.indices(cache, slots, mask.end), options.window)
    keys, values = (_to_float32(each, seen, zero_unseen) for each in (cache.keys, cache.values))
    return _scores(rows, keys, seen, distance, options, bias, cache.precision), values


def _to_float32(
    each: KVBuffer, seen: Bool[Array, "batch tokens some"], zero_unseen: bool
) -> Float[Array, "batch kv_heads some head_dim"]:
    """Keys or values in float32, if `zero_unseen` with zeros in slots that no token sees.

    The mask of the scores and `write_kv`, which writes no values that are not finite, suffice. But
    without the zeros XLA:CPU fuses the cache's update into the product and copies the whole buffer
    in every step of one row (tests/engine/test_engine.py); with them XLA:GPU writes the whole cache
    to memory in float32.
    """
    wide = each.to_float32() if isinstance(each, Int8KV) else each.astype(jnp.float32)
    return jnp.where(seen.any(axis=1)[:, None, :, None], wide, 0.0) if zero_unseen else wide


def _scores(
    rows: Float[Array, "batch kv_heads rows head_dim"],
    keys: Float[Array, "batch kv_heads some head_dim"],
    seen: Bool[Array, "batch tokens some"],
    distance: Int[Array, "batch tokens some"],
    options: ScoreOptions,
    bias: Float[Array, "heads distances"] | None,
    precision: jax.lax.Precision | None,
) -> Float[Array, "batch kv_heads rows some"]:
    """Products of queries and keys, minus infinity where a token is not seen."""
    scores = jnp.einsum("bkrd,bksd->bkrs", rows, keys, precision=precision)
    group = rows.shape[2] // seen.shape[1]
    if options.cap is not None:
        scores = options.cap * jnp.tanh(scores / options.cap)
    if options.slopes:
        slopes = jnp.asarray(options.slopes, jnp.float32).reshape(1, -1, group, 1, 1)
        # A key that is not seen may stand anywhere; it must not become an infinity minus another.
        far = jnp.where(seen, distance, 0).astype(jnp.float32)[:, None, None]
        scores = scores - (slopes * far).reshape(scores.shape)
    if bias is not None:
        max_distance = bias.shape[1] // 2
        # [heads, batch, tokens, some]
        added = bias[:, jnp.clip(distance, -max_distance, max_distance) + max_distance]
        scores = scores + added.swapaxes(0, 1).reshape(scores.shape)
    return jnp.where(jnp.tile(seen, (1, group, 1))[:, None], scores, -jnp.inf)


def _weighted_sum(
    weights: Float[Array, "batch kv_heads rows some"],
    values: Float[Array, "batch kv_heads some head_dim"],
    precision: jax.lax.Precision | None,
) -> Float[Array, "batch kv_heads rows head_dim"]:
    return jnp.einsum("bkrs,bksd->bkrd", weights, values, precision=precision)


_IN_XLA = {"dense": _dense, "blocked": _blocked}
BACKENDS = (*_IN_XLA, NATIVE)
"""How attention is computed; all give the same but for rounding."""
