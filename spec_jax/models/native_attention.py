"""Attention on a CPU by native code, which also rotates heads and writes the cache."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spec_jax.kernels import native_calls
from spec_jax.models.attention_mask import AttentionMask, ScoreOptions
from spec_jax.models.cache import KVState


def attend(
    queries: Float[Array, "batch tokens heads head_dim"],
    cache: KVState,
    mask: AttentionMask,
    scores: ScoreOptions,
) -> Float[Array, "batch tokens heads head_dim"]:
    """The weighted values of a cache that holds everything that the queries see."""
    call = _call(queries, cache, mask, scores, None)
    return native_calls.attention(call, *_buffers(cache))


def write_and_attend(
    queries: Float[Array, "batch tokens heads head_dim"],
    keys: Float[Array, "batch tokens kv_heads head_dim"],
    values: Float[Array, "batch tokens kv_heads head_dim"],
    cache: KVState,
    mask: AttentionMask,
    scores: ScoreOptions,
    rotation: Float[Array, "2 batch tokens half"] | None,
) -> tuple[Float[Array, "batch tokens heads head_dim"], KVState]:
    """Rotates, writes and attends in one call; see `attention.attention`."""
    cache.check_room(keys.shape[1])
    call = _call(queries, cache, mask, scores, rotation)
    out, *buffers = native_calls.write_and_attend(
        call, *_buffers(cache), keys, values, mask.num_tokens
    )
    return out, dataclasses.replace(cache, keys=buffers[0], values=buffers[1])


def _buffers(cache: KVState) -> tuple[Array, Array]:
    assert isinstance(cache.keys, jax.Array) and isinstance(cache.values, jax.Array)
    return cache.keys, cache.values


def _call(
    queries: Float[Array, "batch tokens heads head_dim"],
    cache: KVState,
    mask: AttentionMask,
    scores: ScoreOptions,
    rotation: Float[Array, "2 batch tokens half"] | None,
) -> native_calls.AttentionCall:
    assert mask.causal or not scores.slopes
    positions = mask.positions
    if not mask.causal:  # all stand where the text's last token does, and see what it sees
        positions = jnp.broadcast_to(mask.context_lengths[:, None] - 1, positions.shape)
    if rotation is None:
        rotation = jnp.zeros((2, *positions.shape, 0), jnp.float32)
    return native_calls.AttentionCall(
        queries,
        rotation,
        positions,
        mask.start,
        mask.context_lengths,
        mask.tree_mask,
        mask.depths,
        jnp.asarray(scores.slopes, jnp.float32),
        scale=1 / math.sqrt(scores.query_scalar),
        cap=scores.cap,
        window=scores.window,
        ring=cache.ring,
    )
