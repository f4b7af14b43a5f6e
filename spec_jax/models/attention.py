"""Attention over a cache: the one place where queries meet keys.

`attention(queries, keys, values, cache, mask) -> output, cache`: the cache writes itself, and
the mask says what each query sees, without an array of [batch, tokens, capacity].
`attend` only reads: the output of an encoder, or a sequence that attends to itself.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from spec_jax.kernels import native_calls
from spec_jax.models.cache import Int8KV, KVBuffer, KVCache, KVState
from spec_jax.pytree import pytree, static
from spec_jax.sharding import Placement

MAX_KEY_BLOCK = 256
"""How many keys `blocked` reads at a time, at most. With fewer than 64 it is slow."""
MIN_KEY_BLOCK = 32
MAX_SCORES = 2**19
"""How many scores of a row's key/value head `blocked` computes at a time, at most."""
LARGE_CACHE = 4096
"""From this many slots on, `blocked` keeps the memory of its scores small beside the cache's."""


@dataclasses.dataclass(frozen=True)
class ScoreOptions:
    """The steps from products of queries and keys to the softmax; static under jit.

    Attributes:
      query_scalar: they are divided by its square root.
      cap: then they are `cap * tanh(score / cap)` (Gemma 2); None leaves them.
      slopes: then each head subtracts its slope times the distance of the key (ALiBi, arXiv
        2108.12409); empty for none.
      window: how many latest positions a token sees, itself included; None for all.
    """

    query_scalar: float
    cap: float | None = None
    slopes: tuple[float, ...] = ()
    window: int | None = None


@pytree
class AttentionMask:
    """The positions of new tokens, and which tokens each of them sees.

    New tokens are written side by side from index `start` on, whatever their positions. Each sees
    the text (all indices below `context_lengths`), and the tokens after the text that `tree_mask`
    names. A window is counted in positions. Without `causal` each sees the text and nothing else,
    wherever it stands itself.

    Attributes:
      positions: of each new token in its text.
      start: the index of each row's first new token.
      context_lengths: tokens of each row that all new tokens see; at most `start`.
      tree_mask: which of the tokens from index `context_lengths` on each new token sees, itself
        included. None if the new tokens follow one another, so that each sees all before it.
      depths: distance of those tokens from the text's end; only with `tree_mask`.
      num_tokens: how many of each row's new tokens are real; the others are padding, which is
        neither written nor seen. None if all are.
      causal: whether tokens are new ones that see what is before them; static.
    """

    positions: Int[Array, "batch tokens"]
    start: Int[Array, " batch"]
    context_lengths: Int[Array, " batch"]
    tree_mask: Bool[Array, "tokens num_recent"] | None = None
    depths: Int[Array, " num_recent"] | None = None
    num_tokens: Int[Array, " batch"] | None = None
    causal: bool = static(default=True)

    @classmethod
    def bidirectional(cls, lengths: Int[Array, " batch"], count: int) -> "AttentionMask":
        """The first `count` positions; each sees all of the row's `lengths` tokens."""
        positions = jnp.arange(count, dtype=jnp.int32)[None]
        positions = jnp.broadcast_to(positions, (lengths.shape[0], count))
        return cls(positions, lengths, lengths, causal=False)

    @classmethod
    def following(
        cls, cache: KVCache, count: int, num_tokens: Int[Array, " batch"] | None = None
    ) -> "AttentionMask":
        """`count` tokens that continue each row's text, of which the first `num_tokens` are real.

        Padding stands where the last real token does, and so sees only what was written.
        """
        order = jnp.arange(count, dtype=jnp.int32)[None]
        if num_tokens is not None:
            order = jnp.minimum(order, jnp.maximum(num_tokens, 1)[:, None] - 1)
        positions = cache.lengths[:, None] + order
        return cls(positions, cache.lengths, cache.lengths, num_tokens=num_tokens)

    @classmethod
    def branching(
        cls,
        cache: KVCache,
        depths: Int[np.ndarray, " tokens"],
        tree_mask: Bool[np.ndarray, "tokens tokens"],
    ) -> "AttentionMask":
        """Tokens `depths` positions after each row's text that see each other as in `tree_mask`."""
        offsets = jnp.asarray(depths, jnp.int32)
        positions = cache.lengths[:, None] + offsets[None]
        return cls(positions, cache.lengths, cache.lengths, jnp.asarray(tree_mask), offsets)

    @property
    def end(self) -> Int[Array, " batch"]:
        """The index after the last token that any new one sees, in each row."""
        return self.start + self.positions.shape[1] if self.causal else self.context_lengths

    def seen(
        self, index: Int[Array, "rows slots"], window: int | None
    ) -> tuple[Bool[Array, "batch tokens slots"], Int[Array, "batch tokens slots"]]:
        """Whether each new token sees the token at each index, and how far behind it stands.

        `index` may have one row for all.
        """
        at, index = self.positions[:, :, None], index[:, None, :]
        if not self.causal:
            seen, position = (index >= 0) & (index < self.context_lengths[:, None, None]), index
            seen = jnp.broadcast_to(seen, (*at.shape[:2], index.shape[2]))
        elif self.tree_mask is None or self.depths is None:
            seen, position = (index >= 0) & (index <= at), index
        else:
            behind = index - self.context_lengths[:, None, None]
            recent = jnp.clip(behind, 0, self.depths.shape[0] - 1)
            # [tokens, batch, 1, slots]
            related = self.tree_mask[:, recent][:, :, 0].swapaxes(0, 1)
            inside = (behind >= 0) & (behind < self.depths.shape[0])
            seen = ((index >= 0) & (behind < 0)) | (related & inside)
            position = jnp.where(
                behind < 0, index, self.context_lengths[:, None, None] + self.depths[recent]
            )
        distance = at - position
        return (seen if window is None else seen & (distance < window)), distance


def attention(
    queries: Float[Array, "batch tokens heads head_dim"],
    keys: Float[Array, "batch tokens kv_heads head_dim"],
    values: Float[Array, "batch tokens kv_heads head_dim"],
    cache: KVState | None,
    mask: AttentionMask,
    scores: ScoreOptions,
    bias: Float[Array, "heads distances"] | None = None,
    *,
    backend: str | None = None,
    placement: Placement = Placement.single_device(),
) -> tuple[Float[Array, "batch tokens heads head_dim"], KVState]:
    """Grouped-query attention of new tokens over the cache, in float32.

    Args:
      queries: of the new tokens, rotated.
      keys: of the new tokens, rotated.
      values: of the new tokens.
      cache: the layer's state; None if the tokens see only each other.
      mask: the positions of the new tokens and what they see.
      scores: how scores become weights.
      bias: is added to the scores, see `attend`.
      backend: a name of `BACKENDS`; the fastest by default, see `fastest`.
      placement: how the model lies on devices.

    Returns:
      The weighted values, and the cache with the new tokens.
    """
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
        written = KVState(keys.swapaxes(1, 2), values.swapaxes(1, 2))
    else:
        written = cache.write(keys, values, start, num_tokens)
    axes = ("batch", "kv_heads", "length", None)
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
    is_plain = bias is None and not isinstance(cache.keys, Int8KV)
    platform = placement.platform
    if backend is None or (backend == "native" and not is_plain):
        backend = fastest(platform, queries.shape[1], cache.slots)
    batch, tokens, heads, head_dim = queries.shape
    kv_heads = cache.keys.shape[1]
    group = heads // kv_heads
    # The rows of one product are a group's query heads, then its tokens: in this order a group
    # whose heads are sharded over several devices is not moved.
    rows = queries.reshape(batch, tokens, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, kv_heads, group * tokens, head_dim)
    rows = rows / math.sqrt(scores.query_scalar)
    out = BACKENDS[backend](rows, cache, mask, scores, bias, zero_unseen=platform != "gpu")
    out = out.reshape(batch, kv_heads, group, tokens, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, tokens, heads, head_dim)


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
    slots = jnp.arange(cache.slots, dtype=jnp.int32)
    seen, distance = mask.seen(cache.indices(slots, mask.end), options.window)
    keys, values = (_to_float32(each, seen, zero_unseen) for each in (cache.keys, cache.values))
    scores = _scores(rows, keys, seen, distance, options, bias, cache.precision)
    weights = jax.nn.softmax(scores, axis=-1)
    return _weighted_sum(weights, values, cache.precision)


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
    batch, kv_heads, count, head_dim = rows.shape
    max_size = min(MAX_KEY_BLOCK, MAX_SCORES // count)
    if cache.slots >= LARGE_CACHE:
        # A block of scores takes at most half of the memory of the layer's keys.
        max_size = min(max_size, cache.slots * head_dim // 2 // count)
    size = min(cache.slots, 1 << (max(MIN_KEY_BLOCK, max_size).bit_length() - 1))
    end = mask.end
    used = jnp.minimum(end.max(), cache.slots)
    first = jnp.int32(0)
    if options.window is not None and not cache.ring:
        first = jnp.maximum(mask.positions.min() - options.window + 1, 0) // size

    def read(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        best, total, out = carry
        # The last block may reach back into the one before it, whose slots count once.
        at = jnp.minimum(i * size, cache.slots - size)
        slots = at + jnp.arange(size, dtype=jnp.int32)
        seen, distance = mask.seen(cache.indices(slots, end), options.window)
        seen = seen & (slots >= i * size)[None, None]

        def block(each: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(each, at, size, axis=2)

        keys, values = (
            _to_float32(jax.tree.map(block, each), seen, zero_unseen)
            for each in (cache.keys, cache.values)
        )
        scores = _scores(rows, keys, seen, distance, options, bias, cache.precision)
        higher = jnp.maximum(best, scores.max(-1))
        # Before the first visible key, minus infinity must not be subtracted from itself.
        shift = jnp.where(higher == -jnp.inf, 0.0, higher)
        weights, faded = jnp.exp(scores - shift[..., None]), jnp.exp(best - shift)
        added = _weighted_sum(weights, values, cache.precision)
        return higher, total * faded + weights.sum(-1), out * faded[..., None] + added

    zeros = jnp.zeros((batch, kv_heads, count), jnp.float32)
    carry = (zeros - jnp.inf, zeros, jnp.zeros_like(rows))
    _, total, out = jax.lax.fori_loop(first, (used + size - 1) // size, read, carry)
    return out / total[..., None]


def _native(
    rows: Float[Array, "batch kv_heads rows head_dim"],
    cache: KVState,
    mask: AttentionMask,
    options: ScoreOptions,
    bias: Float[Array, "heads distances"] | None = None,
    zero_unseen: bool = True,
) -> Float[Array, "batch kv_heads rows head_dim"]:
    """One call of native code on CPU."""
    assert bias is None and (mask.causal or not options.slopes)
    assert isinstance(cache.keys, jax.Array) and isinstance(cache.values, jax.Array)
    positions = mask.positions
    if not mask.causal:  # all stand where the text's last token does, and see what it sees
        positions = jnp.broadcast_to(mask.context_lengths[:, None] - 1, positions.shape)
    return native_calls.attention(
        rows,
        cache.keys,
        cache.values,
        positions,
        mask.start,
        mask.context_lengths,
        mask.tree_mask,
        mask.depths,
        jnp.asarray(options.slopes, jnp.float32),
        cap=options.cap,
        window=options.window,
        ring=cache.ring,
    )


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


BACKENDS = {"dense": _dense, "blocked": _blocked, "native": _native}
"""How attention is computed; all give the same but for rounding."""
