"""Attention against float64, whatever the backend, the mask and the cache."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.models.attention import attention
from spec_jax.models.attention_mask import AttentionMask, ScoreOptions
from spec_jax.models.cache import KVCache, KVState, StateSize
from spec_jax.models.config import TransformerConfig
from spec_jax.models.mixers import new_cache
from spec_jax.sharding import Placement
from tests.models.backends import EACH_BACKEND

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
SHAPE = TransformerConfig.of(
    vocab_size=4,
    embed_size=8,
    num_layers=1,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    mlp_size=4,
    max_position=4096,
)
LENGTHS = [0, 1, 37, 300]
"""Tokens that the rows hold already."""


def expected(queries, text_keys, text_values, keys, values, seen, options, positions, depths):
    """Softmax in float64 over the keys that each token sees, listed one by one."""
    out = np.zeros(queries.shape)
    for t in range(queries.shape[0]):
        places = np.array([*range(len(text_keys)), *(len(text_keys) + d for d in depths)])
        visible = [*[True] * len(text_keys), *seen[t]]
        if options.window is not None:
            visible = [
                each and positions[t] - place < options.window
                for each, place in zip(visible, places, strict=True)
            ]
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            k = np.concatenate([text_keys[:, kv], keys[:, kv]]).astype(np.float64)[visible]
            v = np.concatenate([text_values[:, kv], values[:, kv]]).astype(np.float64)[visible]
            scores = k @ queries[t, head].astype(np.float64) / math.sqrt(options.query_scalar)
            if options.cap is not None:
                scores = options.cap * np.tanh(scores / options.cap)
            if options.slopes:
                scores -= options.slopes[head] * (positions[t] - places[visible])
            weights = np.exp(scores - scores.max())
            out[t, head] = weights @ v / weights.sum()
    return out


CHANGES = [{}, {"cap": 0.5}, {"slopes": (0.5, 0.25, 0.1, 0.02), "query_scalar": 3.0}]
"""Of scores."""
PATTERNS = {
    "one": ([0], np.ones((1, 1), bool)),
    "chain": (np.arange(6), np.tri(6, dtype=bool)),
    # Two drafts of three tokens behind the last known one.
    "tree": (
        [0, 1, 1, 2, 2, 3, 3],
        np.array(
            [
                [1, 0, 0, 0, 0, 0, 0],
                [1, 1, 0, 0, 0, 0, 0],
                [1, 0, 1, 0, 0, 0, 0],
                [1, 1, 0, 1, 0, 0, 0],
                [1, 0, 1, 0, 1, 0, 0],
                [1, 1, 0, 1, 0, 1, 0],
                [1, 0, 1, 0, 1, 0, 1],
            ],
            bool,
        ),
    ),
}


@pytest.mark.parametrize(
    ("window", "ring"), [(None, False), (2, False), (40, False), (2, True), (40, True)]
)
@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("mask", PATTERNS)
@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_the_output_is_the_definitions(backend, mask, window, ring, changes):
    options = ScoreOptions(**{"query_scalar": float(HEAD_DIM), "window": window} | changes)
    depths, seen = PATTERNS[mask]
    count, rows = len(depths), len(LENGTHS)
    rng = np.random.default_rng(count)
    slots = 128 if ring else 768

    def random(*shape):
        return rng.normal(size=shape).astype(np.float32)

    texts = [(random(n, KV_HEADS, HEAD_DIM), random(n, KV_HEADS, HEAD_DIM)) for n in LENGTHS]
    shape = (rows, KV_HEADS, slots, HEAD_DIM)
    # What was never written, or lies past a row's text, is NaN.
    blank = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    for row, each in enumerate(texts):
        for buffer, text in zip(blank, each, strict=True):
            for index in range(len(text)):
                buffer[row, :, index % slots] = text[index]
    cache = KVState(*map(jnp.asarray, blank), ring=ring)
    queries, keys, values = (random(rows, count, n, HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    state = KVCache((cache,), lengths)
    made = (
        AttentionMask.branching(state, np.asarray(depths), seen)
        if mask == "tree"
        else AttentionMask.following(state, count)
    )

    @jax.jit
    def call(queries, keys, values, cache, made):
        return attention(
            queries,
            keys,
            values,
            cache,
            made,
            options,
            backend=backend,
        )

    out, after = call(*map(jnp.asarray, (queries, keys, values)), cache, made)
    for row, length in enumerate(LENGTHS):
        expected_row = expected(
            queries[row],
            *texts[row],
            keys[row],
            values[row],
            seen,
            options,
            length + np.asarray(depths),
            depths,
        )
        np.testing.assert_allclose(out[row], expected_row, atol=2e-6)
        for j in range(count):
            np.testing.assert_array_equal(after.keys[row, :, (length + j) % slots], keys[row, j])
            np.testing.assert_array_equal(
                after.values[row, :, (length + j) % slots], values[row, j]
            )


@pytest.mark.parametrize(
    ("window", "ring"), [(None, False), (5, False), (40, False), (5, True), (40, True)]
)
@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.native
def test_a_path_of_a_tree_has_the_bits_of_the_same_tokens_one_by_one(changes, window, ring):
    options = ScoreOptions(**{"query_scalar": float(HEAD_DIM), "window": window} | changes)
    depths, seen = PATTERNS["tree"]
    rng, slots = np.random.default_rng(5), 128 if ring else 768
    rows, count = len(LENGTHS), len(depths)
    buffers = (rng.normal(size=(rows, KV_HEADS, slots, HEAD_DIM)) for _ in "kv")
    cache = KVState(*(jnp.asarray(each, jnp.float32) for each in buffers), ring=ring)
    state = KVCache((cache,), jnp.asarray(LENGTHS, jnp.int32))
    new = [
        jnp.asarray(rng.normal(size=(rows, count, n, HEAD_DIM)), jnp.float32)
        for n in (HEADS, KV_HEADS, KV_HEADS)
    ]
    call = jax.jit(functools.partial(attention, scores=options, backend="native"))
    out, _ = call(*new, cache, AttentionMask.branching(state, np.asarray(depths), seen))
    for leaf in (5, 6):
        path, layer = np.flatnonzero(seen[leaf]), cache
        for depth, token in enumerate(path):
            state = KVCache((layer,), jnp.asarray(LENGTHS, jnp.int32) + depth)
            one = [each[:, token : token + 1] for each in new]
            alone, layer = call(*one, layer, AttentionMask.following(state, 1))
            np.testing.assert_array_equal(out[:, token], alone[:, 0])


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_a_value_that_is_no_number_reaches_only_the_tokens_that_see_it(
    backend, platform, monkeypatch
):
    monkeypatch.setattr(Placement, "platform", platform)
    rng = np.random.default_rng(0)
    queries, keys, values = (
        jnp.asarray(rng.normal(size=(2, 3, n, HEAD_DIM)), jnp.float32)
        for n in (HEADS, KV_HEADS, KV_HEADS)
    )
    values = values.at[0, 1].set(jnp.nan)
    cache = new_cache(SHAPE, StateSize(2, 512, jnp.float32))
    mask = AttentionMask.following(cache, 3)
    call = jax.jit(
        functools.partial(attention, scores=ScoreOptions(float(HEAD_DIM)), backend=backend)
    )
    out, _ = call(queries, keys, values, cache.layers[0], mask)
    broken = np.isnan(np.asarray(out)).any((2, 3))
    assert broken.tolist() == [[False, True, True], [False, False, False]]


def test_values_too_large_for_the_cache_reach_only_the_tokens_that_see_them(monkeypatch):
    """On GPU nothing hides the slots that no token sees, and zero times infinity is NaN."""
    monkeypatch.setattr(Placement, "platform", "gpu")
    ones = jnp.ones((2, 3, KV_HEADS, HEAD_DIM))
    values = ones.at[0, 1].set(np.finfo(np.float32).max)  # infinity in bfloat16
    cache = new_cache(SHAPE, StateSize(2, 512, jnp.bfloat16))
    call = functools.partial(attention, scores=ScoreOptions(float(HEAD_DIM)), backend="dense")
    queries = jnp.ones((2, 3, HEADS, HEAD_DIM))
    out, _ = call(queries, ones, values, cache.layers[0], AttentionMask.following(cache, 3))
    broken = np.isnan(np.asarray(out)).any((2, 3))
    assert broken.tolist() == [[False, True, True], [False, False, False]]


@pytest.mark.parametrize("backend", ["dense", "blocked"])
def test_slots_that_are_not_hidden_change_nothing(backend, monkeypatch):
    """Of other texts than before: rows that were rolled back leave theirs."""
    rng = np.random.default_rng(2)
    shape = (2, KV_HEADS, 512, HEAD_DIM)
    layer = KVState(*(jnp.asarray(1e3 * rng.normal(size=shape), jnp.float32) for _ in "kv"))
    new = (
        jnp.asarray(rng.normal(size=(2, 3, n, HEAD_DIM)), jnp.float32)
        for n in (HEADS, KV_HEADS, KV_HEADS)
    )
    queries, keys, values = new
    mask = AttentionMask.following(KVCache((layer,), jnp.asarray([5, 300], jnp.int32)), 3)
    outputs = {}
    for platform in ("cpu", "gpu"):
        monkeypatch.setattr(Placement, "platform", platform)
        outputs[platform], _ = attention(
            queries, keys, values, layer, mask, ScoreOptions(float(HEAD_DIM)), backend=backend
        )
    np.testing.assert_allclose(outputs["gpu"], outputs["cpu"], rtol=1e-6)


def test_neighbours_however_long_change_no_bit():
    """Blocks that a row does not see leave its sums as they are."""
    rng = np.random.default_rng(1)
    slots = 4096
    cache = KVState(
        *(jnp.asarray(rng.normal(size=(2, KV_HEADS, slots, HEAD_DIM)), jnp.float32) for _ in "kv")
    )
    queries, keys, values = (
        jnp.asarray(rng.normal(size=(2, 3, n, HEAD_DIM)), jnp.float32)
        for n in (HEADS, KV_HEADS, KV_HEADS)
    )

    @jax.jit
    def call(other):
        lengths = jnp.stack([jnp.int32(50), other])
        mask = AttentionMask.following(KVCache((cache,), lengths), 3)
        return attention(
            queries, keys, values, cache, mask, ScoreOptions(float(HEAD_DIM)), backend="blocked"
        )[0]

    first = call(jnp.int32(0))[0]
    for other in (49, 1000, 4000):
        np.testing.assert_array_equal(call(jnp.int32(other))[0], first)
