"""The seam for features: at each kept token a drafter gets what the target computes there."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.config import SamplingParams
from spec_jax.decoding import prefill
from spec_jax.decoding.draft_length import Constant
from spec_jax.drafters import Drafter, pytree
from spec_jax.sharding import Layout
from spec_jax.sharding.layout import Rule
from tests import harness
from tests.feature_drafter import FeatureDrafter
from tests.harness import DRAFT, TARGET, make_engine, request, run
from tests.often import often

LAYERS = (TARGET.config.num_layers, 0, 1)
PROMPTS = [[3], [1, 2, 3, 4, 5, 1, 2], [7, 7, 7, 7], list(range(16)) * 5]


@pytree
class Recorder(Drafter):
    """Keeps the features of every token beside what another drafter does."""

    inner: Drafter

    lookahead = property(lambda self: self.inner.lookahead)
    num_drafts = property(lambda self: self.inner.num_drafts)
    fixed_length = property(lambda self: self.inner.fixed_length)
    feature_layers = LAYERS

    def init(self, prompt):
        shape = (*prompt.tokens.shape, len(LAYERS), TARGET.config.embed_size)
        return self.inner.init(prompt), jnp.full(shape, jnp.nan)

    def prefill(self, state, block):
        return self.inner.prefill(state[0], block), written(
            state[1], block.features, block.begin, block.num_tokens
        )

    def propose(self, state, context):
        draft, inner = self.inner.propose(state[0], context)
        return draft, (inner, state[1])

    def commit(self, state, committed):
        begin, count = committed.before - 1, committed.lengths - committed.before
        return self.inner.commit(state[0], committed), written(
            state[1], committed.features, begin, count
        )


def written(buffer, features, begin, count):
    order = jnp.arange(features.shape[1], dtype=jnp.int32)[None]
    at = jnp.where(order < count[:, None], begin[:, None] + order, buffer.shape[1])
    return jax.vmap(lambda row, new, at: row.at[at].set(new, mode="drop"))(buffer, features, at)


@functools.cache
def features_of(tokens):
    rows = jnp.asarray(tokens, jnp.int32)[None]
    out = TARGET.score(rows, TARGET.new_cache(*rows.shape), feature_layers=LAYERS)
    return np.asarray(out.features[0])


def recording(name):
    return lambda *args: dataclasses.replace(
        harness.DRAFTINGS[name](*args), drafter=Recorder(harness.DRAFTINGS[name](*args).drafter)
    )


@pytest.mark.parametrize("method", often(["none", "other", "other, varying", "tree"], ["tree"]))
def test_every_kept_token_has_its_own_features(method, monkeypatch):
    """Of prompts, of accepted and of refused drafts, of rounds without one, of a tree's branch."""
    name, comma, varying = method.partition(",")
    monkeypatch.setitem(harness.DRAFTINGS, "recorder", recording(name))
    engine = make_engine(f"recorder{comma}{varying}", TARGET, DRAFT)
    params = SamplingParams(max_tokens=20, temperature=1.0)
    batch = engine.start([request(each, params, seed=i) for i, each in enumerate(PROMPTS)])
    while batch.running:
        batch.advance(2)
    recorded = np.asarray(batch.state.drafter[1])
    for row in range(len(PROMPTS)):
        length = int(batch.view.lengths[row])
        tokens = tuple(batch.view.tokens[row, :length].tolist())
        np.testing.assert_allclose(recorded[row, : length - 1], features_of(tokens)[:-1], atol=1e-4)
        assert np.isnan(recorded[row, length - 1 :]).all()


def test_early_exit_gives_the_features_of_the_layers_that_scoring_runs():
    tokens = jnp.asarray([[1, 2, 3]], jnp.int32)
    hidden, cache = TARGET.run_first_layers(tokens, TARGET.new_cache(1, 8), 1)
    out = TARGET.run_remaining_layers(hidden, cache, 1, feature_layers=(1, 2))
    whole = TARGET.score(tokens, TARGET.new_cache(1, 8), feature_layers=(1, 2))
    np.testing.assert_array_equal(out.features, whole.features)
    with pytest.raises(ValueError, match=r"features \[0\] are not in layers 1 to 2"):
        TARGET.run_remaining_layers(hidden, cache, 1, feature_layers=(0, 2))


@pytest.mark.parametrize("method", often(["features", "features, varying"], ["features"]))
def test_a_drafter_of_features_on_a_mesh_of_four(method):
    rules = (*Layout.tensor_parallel(2).target, ("batch", Rule(("data",))))
    both = {"target": rules, "draft": rules}
    layout = Layout("four", (("data", 2), ("model", 2)), "cpu", **both)
    target = TARGET.place(layout.place("target", TARGET.config.axis_sizes))
    params = SamplingParams(max_tokens=24)
    requests = [request(each, params) for each in PROMPTS]
    plain = run(harness.shared_engine("none"), requests)
    engine = make_engine(method, target, DRAFT, lookahead=3)
    assert run(engine, requests) == plain
    assert run(make_engine(method, TARGET, DRAFT, lookahead=3), requests) == plain


# Prefill in steps.

BLOCK, CAPACITY = 8, 96


def started(drafter, prompts):
    tokens = np.zeros((len(prompts), CAPACITY), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    lengths = jnp.asarray([len(prompt) for prompt in prompts], jnp.int32)
    return prefill.start(
        TARGET,
        drafter,
        Constant(3),
        tokens=jnp.asarray(tokens),
        lengths=lengths,
        max_lengths=lengths + 5,
        keys=jnp.zeros((len(prompts), 2), jnp.uint32),
        may_draft=jnp.ones((len(prompts),), bool),
        block=BLOCK,
    )


def assert_same(ours, theirs):
    """The same numbers, bit for bit, wherever they count."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["other", "features"])
def test_steps_read_what_one_program_reads(name):
    drafter = harness.DRAFTINGS[name](TARGET, DRAFT, 3).drafter
    whole = jax.jit(lambda: prefill.prefill(TARGET, drafter, started(drafter, PROMPTS), BLOCK))()
    step = jax.jit(lambda state: prefill.prefill_step(TARGET, drafter, state, BLOCK))
    state = started(drafter, PROMPTS)
    assert state.cache.lengths.tolist() == [0] * 4
    for count in range(1, 11):
        state = step(state)
        assert state.cache.lengths.tolist() == [
            min(count * BLOCK, len(prompt) - 1) for prompt in PROMPTS
        ]
    assert_same(step(state), state)  # nothing is left
    assert_same(state, whole)


@pytest.mark.parametrize("name", ["other", "features", "none"])
def test_a_copied_prefix_is_as_good_as_one_that_was_read(name):
    """Prefixes end where blocks do, so that even the last bits agree."""
    drafter = harness.DRAFTINGS[name](TARGET, DRAFT, 3).drafter
    assert drafter.copies_prefixes
    long, new = list(range(16)) * 5, [*range(16), *range(16), 0] + [9] * 20
    read = jax.jit(lambda state: prefill.prefill(TARGET, drafter, state, BLOCK))
    others = read(started(drafter, [long, long, long]))
    prompts = [new, long, [5]]
    begun = prefill.copy_prefix(
        drafter, started(drafter, prompts), others, jnp.asarray([32, 72, 0], jnp.int32)
    )
    assert begun.cache.lengths.tolist() == [32, 72, 0]
    ours, theirs = read(begun), read(started(drafter, prompts))
    assert ours.cache.lengths.tolist() == theirs.cache.lengths.tolist()
    for row, prompt in enumerate(prompts):
        count = len(prompt) - 1

        def kept(state, row=row, count=count):
            arrays = [leaf for leaf in jax.tree.leaves((state.cache, state.drafter))]
            return [
                leaf[row, :, :count] if leaf.ndim == 4 else leaf[row, :count]
                for leaf in arrays
                if leaf.ndim > 2
            ]

        assert_same(kept(ours), kept(theirs))


def test_a_drafter_that_reads_prompts_must_say_how_a_prefix_is_copied():
    @pytree
    class Forgets(FeatureDrafter):
        copy_prefix = Drafter.copy_prefix

    drafter = FeatureDrafter.random(TARGET, 3)
    assert drafter.copies_prefixes
    assert not Forgets(drafter.weights, 3, drafter.feature_layers).copies_prefixes
