"""Ring caches: whatever is appended, refused or replaced, attention sees its whole window."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.models.attention import attention
from spec_jax.models.attention_mask import AttentionMask, ScoreOptions
from spec_jax.models.cache import RING_MULTIPLE, KVCache, StateSize
from spec_jax.models.config import TransformerConfig
from spec_jax.models.mixers import new_cache
from tests.models.backends import EACH_BACKEND
from tests.often import often
from tests.reshaped import reshaped

# Together they fill a ring to its last slot.
WINDOW, HEADROOM = 11, RING_MULTIPLE - 11
ROWS, HEADS, KV_HEADS, HEAD_DIM = 3, 2, 1, 4
SHAPE = TransformerConfig.of(
    vocab_size=4,
    embed_size=8,
    num_layers=1,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    mlp_size=4,
    max_position=4096,
    sliding_window=WINDOW,
)
CAPACITY = 4096
TREE = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], bool)
DEPTHS = np.array([0, 1, 1, 2])
PATHS = [[0, 1, 3], [0, 2]]
"""Places of the tree that may be kept, from its root on."""


def test_only_layers_with_a_window_get_rings_and_only_where_they_are_smaller():
    def slots(headroom, capacity, **changes):
        shape = reshaped(SHAPE, **{"num_layers": 2, "sliding_window": WINDOW} | changes)
        cache = new_cache(shape, StateSize(1, capacity, jnp.float32, headroom))
        return [(layer.slots, layer.ring) for layer in cache.layers]

    # Windows are often whole multiples, so that headroom needs another one.
    assert slots(8, CAPACITY, sliding_window=512)[0] == (512 + RING_MULTIPLE, True)
    assert slots(RING_MULTIPLE, CAPACITY, sliding_window=512)[0] == (512 + RING_MULTIPLE, True)
    assert slots(RING_MULTIPLE + 1, CAPACITY, sliding_window=512)[0] == (
        512 + 2 * RING_MULTIPLE,
        True,
    )
    ring, full = (RING_MULTIPLE, True), (CAPACITY, False)
    assert slots(HEADROOM, CAPACITY) == [ring, ring]
    assert slots(HEADROOM, CAPACITY, global_every=2) == [ring, full]
    assert slots(HEADROOM, CAPACITY, sliding_window=None) == [full, full]
    assert slots(None, CAPACITY) == [full, full]
    assert slots(HEADROOM, 32) == [(32, False)] * 2


@functools.cache
def compiled(backend):
    call = functools.partial(
        attention, scores=ScoreOptions(float(HEAD_DIM), window=WINDOW), backend=backend
    )
    return jax.jit(call)


@jax.jit
def spoil(layer, spoilt):
    return jax.tree.map(lambda each: jnp.where(spoilt[:, None, :, None], jnp.nan, each), layer)


@jax.jit
def replace(cache, slot, other, source):
    return jax.tree.map(lambda ours, theirs: ours.at[slot].set(theirs[source]), cache, other)


class Rows:
    """Rows of random tokens in a ring, and beside them as plain lists."""

    def __init__(self, rng, backend):
        self.rng = rng
        self.cache = new_cache(SHAPE, StateSize(ROWS, CAPACITY, jnp.float32, HEADROOM))
        self.texts = [[] for _ in range(ROWS)]
        self._attention = compiled(backend)

    def tokens(self, count):
        """Random queries, keys and values."""
        return tuple(
            self.rng.normal(size=(ROWS, count, n, HEAD_DIM)).astype(np.float32)
            for n in (HEADS, KV_HEADS, KV_HEADS)
        )

    def read(self, count, tree=False):
        """New tokens behind each text; checks what they see."""
        self.cache = self.cache.with_lengths(jnp.asarray(list(map(len, self.texts)), jnp.int32))
        self.discard()
        queries, keys, values = self.tokens(count)
        if tree:
            mask = AttentionMask.branching(self.cache, DEPTHS, TREE)
        else:
            mask = AttentionMask.following(self.cache, count)
        out, layer = self._attention(queries, keys, values, self.cache.layers[0], mask)
        self.cache = KVCache((layer,), self.cache.lengths)
        new = [list(zip(keys[row], values[row], strict=True)) for row in range(ROWS)]
        expected = np.empty((ROWS, count, HEADS, HEAD_DIM))
        for row, text in enumerate(self.texts):
            latest = text[-WINDOW:]
            for t in range(count):
                path = np.flatnonzero(TREE[t]) if tree else range(max(0, t + 1 - WINDOW), t + 1)
                seen = [*latest, *(new[row][place] for place in path)][-WINDOW:]
                expected[row, t] = self.attended(queries[row, t], seen)
        np.testing.assert_allclose(out, expected, atol=1e-5)
        return new

    def attended(self, queries, seen):
        k, v = (np.stack([each[i][0] for each in seen]).astype(np.float64) for i in (0, 1))
        scores = queries.astype(np.float64) @ k.T / np.sqrt(HEAD_DIM)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights @ v / weights.sum(-1, keepdims=True)

    def discard(self):
        """NaN in every slot that no later token may see."""
        layer = self.cache.layers[0]
        spoilt = np.ones((ROWS, layer.slots), bool)
        for row, text in enumerate(self.texts):
            for index in range(max(0, len(text) - WINDOW + 1), len(text)):
                spoilt[row, index % layer.slots] = False
        self.cache = KVCache((spoil(layer, spoilt),), self.cache.lengths)

    def draft(self):
        """A chain, of which each row keeps a prefix: the rest is rolled back."""
        new = self.read(int(self.rng.choice([1, 2, 5])))
        for text, each in zip(self.texts, new, strict=True):
            text += each[: int(self.rng.integers(0, len(each) + 1))]

    def prompt(self):
        """A block as wide as the headroom allows, of which the end is padding."""
        new = self.read(HEADROOM)
        for text, each in zip(self.texts, new, strict=True):
            text += each[: int(self.rng.integers(0, len(each) + 1))]

    def tree(self):
        """A tree, of which each row keeps one path."""
        new = self.read(len(DEPTHS), tree=True)
        chosen = [PATHS[int(self.rng.integers(len(PATHS)))] for _ in self.texts]
        longest = max(map(len, PATHS))
        padded = [[*path, *[0] * (longest - len(path))] for path in chosen]
        lengths = self.cache.lengths
        sources = lengths[:, None] + jnp.asarray(padded, jnp.int32)
        self.cache = self.cache.gather(sources, lengths)
        for text, each, path in zip(self.texts, new, chosen, strict=True):
            text += [each[place] for place in path[: int(self.rng.integers(1, len(path) + 1))]]

    def join(self):
        """A row from elsewhere takes the place of one."""
        other = Rows(self.rng, "blocked")
        for _ in range(3):
            other.prompt()
        source, slot = (int(self.rng.integers(ROWS)) for _ in range(2))
        self.cache = replace(self.cache, slot, other.cache, source)
        self.texts[slot] = list(other.texts[source])


@pytest.mark.parametrize("backend", EACH_BACKEND)
@pytest.mark.parametrize(("runs", "operations"), often([(3, 30), (500, 50)], [(3, 30)]))
def test_a_ring_is_as_good_as_all_of_the_text(backend, runs, operations):
    for run in range(runs):
        rng = np.random.default_rng(run)
        rows = Rows(rng, backend)
        for _ in range(operations):
            getattr(rows, rng.choice(["draft", "draft", "prompt", "tree", "join"]))()
        rows.draft()
