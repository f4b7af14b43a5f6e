"""However the target is called, a position has the distribution of the text before it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.config import SamplingParams
from spec_jax.decoding import loop, prefill
from spec_jax.decoding.draft_length import Constant
from spec_jax.decoding.score import kv_slots_per_round, score
from spec_jax.drafters.base import Draft
from spec_jax.drafters.none import NoDraft
from spec_jax.sampling.parameters import BatchSampling
from spec_jax.testing import ReferenceDecoder, tiny_model

TARGET = tiny_model(0, vocab_size=8, embed_size=16)
REFERENCE = ReferenceDecoder(TARGET)
TEXTS = [[1, 2, 3, 1, 2], [5], [7, 6, 7, 6, 7, 6, 7, 6]]
PARAMS = SamplingParams(
    temperature=0.8, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.5
)
SAMPLING = BatchSampling.stack([PARAMS] * len(TEXTS), 8)
STEPS, DRAFTS = 3, 3
# Three drafts that begin alike in the first row; in the second one repeats itself; others end.
TREE = np.array(
    [
        [[4, 4, 4], [5, 5, 2], [1, 6, 2]],
        [[0, 0, 1], [0, 3, 1], [0, 2, -1]],
        [[2, 3, -1], [2, -1, -1], [7, -1, -1]],
    ],
    np.int32,
)


@functools.cache
def state():
    tokens = np.zeros((len(TEXTS), 32), np.int32)
    for row, text in enumerate(TEXTS):
        tokens[row, : len(text)] = text
    lengths = jnp.array([len(text) for text in TEXTS], jnp.int32)

    def read(tokens):
        state = prefill.start(
            TARGET,
            NoDraft(),
            Constant(0),
            tokens=tokens,
            lengths=lengths,
            max_lengths=lengths + 5,
            keys=jnp.zeros((len(TEXTS), 2), jnp.uint32),
            may_draft=jnp.ones((len(TEXTS),), bool),
            block=8,
        )
        return prefill.prefill(TARGET, NoDraft(), state, 8)

    return jax.jit(read)(jnp.asarray(tokens))


LAYERS = (0, 1, TARGET.config.num_layers)


def scored(tokens, drafts=1, scoring="block", given=None):
    """p [rows, places, V] of drafts [rows, steps * drafts], the features, and the cache."""
    lengths = jnp.full((len(TEXTS),), tokens.shape[1] // drafts, jnp.int32)
    draft = Draft(jnp.asarray(tokens), None, lengths, num_drafts=drafts)
    call = jax.jit(
        lambda state, draft: score(TARGET, state, draft, SAMPLING, scoring, feature_layers=LAYERS)
    )
    result = call(given or state(), draft)
    return np.asarray(result.p), np.asarray(result.features), result.cache


def expected(row, before):
    context = TEXTS[row] + [int(token) for token in before]
    return REFERENCE.distribution(context, len(TEXTS[row]), PARAMS)


def features_after(text):
    """The features [taps, embed] at the last token of a text that is read alone."""
    tokens = np.zeros((1, 16), np.int32)
    tokens[0, : len(text)] = text
    return np.stack([layer[0, len(text) - 1] for layer in features_of(tokens)])


@jax.jit
def features_of(tokens):
    embedding = TARGET.module.embed_tokens(tokens)
    later = [
        TARGET.run_first_layers(tokens, TARGET.new_cache(1, 16), last)[0] for last in LAYERS[1:]
    ]
    return [embedding, *later]


@pytest.mark.parametrize("scoring", ["block", "prefix_batch"])
@pytest.mark.slow
def test_each_place_of_a_draft_is_scored_after_its_own_text(scoring):
    tokens = np.maximum(TREE[:, :, 0], 0)
    p, features, cache = scored(tokens, scoring=scoring)
    for row in range(len(TEXTS)):
        for place in range(STEPS + 1):
            np.testing.assert_allclose(
                p[row, place], expected(row, tokens[row, :place]), rtol=0, atol=1e-5
            )
            own = features_after([*TEXTS[row], *tokens[row, :place]])
            np.testing.assert_allclose(features[row, place], own, atol=1e-4)
    # The entries that a commit may keep stand where the text goes on.
    plain = scored(tokens)[2]
    for ours, theirs in zip(cache.layers, plain.layers, strict=True):
        for row, text in enumerate(TEXTS):
            end = len(text) + STEPS
            kept, wanted = ours.values[row, :, :end], theirs.values[row, :, :end]
            np.testing.assert_allclose(kept, wanted, atol=1e-5)


def test_each_draft_of_a_tree_is_scored_as_if_by_itself():
    p, features, _ = scored(TREE.reshape(len(TEXTS), -1), drafts=DRAFTS)
    assert p.shape[1] == 1 + STEPS * DRAFTS
    for row in range(len(TEXTS)):
        np.testing.assert_allclose(p[row, 0], expected(row, []), rtol=0, atol=1e-5)
        for n in range(DRAFTS):
            for step in range(STEPS):
                before = TREE[row, : step + 1, n]
                if (before >= 0).all():
                    place = p[row, 1 + step * DRAFTS + n]
                    np.testing.assert_allclose(place, expected(row, before), rtol=0, atol=1e-5)
                    own = features_after([*TEXTS[row], *before])
                    np.testing.assert_allclose(features[row, 1 + step * DRAFTS + n], own, atol=1e-4)


def test_the_branch_that_is_kept_leaves_the_cache_of_its_own_text():
    *_, cache = scored(TREE.reshape(len(TEXTS), -1), drafts=DRAFTS)
    chosen = [2, 1, 0]
    tokens = np.stack([np.maximum(TREE[row, :, n], 0) for row, n in enumerate(chosen)])
    *_, plain = scored(tokens)
    lengths = state().lengths
    path = np.arange(STEPS)[None] * DRAFTS + np.array(chosen)[:, None]
    kept = cache.gather(lengths[:, None] + jnp.asarray(path, jnp.int32), lengths)
    for ours, theirs in zip(
        jax.tree.leaves(kept.layers), jax.tree.leaves(plain.layers), strict=True
    ):
        for row, text in enumerate(TEXTS):
            end = len(text) + STEPS
            np.testing.assert_allclose(ours[row, :, :end], theirs[row, :, :end], atol=1e-5)


@pytest.mark.parametrize(
    ("scoring", "drafts"), [("block", 1), ("block", DRAFTS), ("prefix_batch", 1)]
)
def test_scoring_writes_as_many_entries_as_it_says(scoring, drafts):
    """One more would be moved over an entry that counts, at the end of the room."""
    tokens = TREE.reshape(len(TEXTS), -1) if drafts > 1 else np.maximum(TREE[:, :, 0], 0)
    cache = state().cache
    blank = dataclasses.replace(
        cache, layers=jax.tree.map(lambda each: jnp.full_like(each, 9.0), cache.layers)
    )
    given = dataclasses.replace(state(), cache=blank)
    written = np.asarray(scored(tokens, drafts, scoring, given)[2].layers[0].keys) != 9.0
    for row, text in enumerate(TEXTS):
        entries = np.flatnonzero(written[row].any((0, 2)))
        count = kv_slots_per_round(scoring, STEPS, drafts)
        assert entries.tolist() == list(range(len(text) - 1, len(text) - 1 + count))


@pytest.mark.parametrize("choice", [{"scoring": "stairs"}, {"verification": "blocks"}])
def test_an_unknown_strategy_is_refused(choice):
    """The aliases of options are `SpeculativeConfig`'s: nothing else runs in their place."""
    with pytest.raises(ValueError, match=r"is '\w+'; take one of "):
        loop.Strategy(Constant(4), **choice)
