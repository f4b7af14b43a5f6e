"""Encoder-decoders: the same loop, drafters and batches, and a source that belongs to its row."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.config import SamplingParams
from spec_jax.decoding.draft_length import Constant
from spec_jax.drafters.base import Context, DrafterPrompt
from spec_jax.drafters.draft_model import DraftModel
from spec_jax.drafters.prompt_lookup import PromptLookup
from spec_jax.engine.engine import Engine
from spec_jax.engine.requests import RequestInput
from spec_jax.evaluation.audit import audit
from spec_jax.models.source import EncoderInput
from spec_jax.sampling.parameters import BatchSampling
from spec_jax.sharding import Layout, Rule
from spec_jax.testing import ReferenceDecoder, tiny_model
from tests.harness import DRAFTINGS, chi_square, drive, make_engine, request, run
from tests.often import often

TARGET = tiny_model(0, encoder_layers=2)
DRAFT = tiny_model(1, num_layers=1, encoder_layers=1)
VOCAB = TARGET.config.vocab_size
RANDOM = np.random.default_rng(0)
SOURCES = [RANDOM.integers(0, VOCAB, size).tolist() for size in (3, 40, 17, 1)]
GREEDY = SamplingParams(max_tokens=30, repetition_penalty=1.5)


@functools.cache
def engine_of(method):
    return make_engine(method, TARGET, DRAFT, lookahead=3)


@functools.cache
def expected(number):
    return ReferenceDecoder(TARGET, SOURCES[number]).greedy([0], GREEDY)[0]


def test_the_source_matters():
    assert len({tuple(expected(i)) for i in range(len(SOURCES))}) == len(SOURCES)


@pytest.mark.parametrize("method", often(DRAFTINGS, ["other"]))
def test_greedy_tokens_are_the_targets(method):
    requests = [request([0], GREEDY, source=source) for source in SOURCES]
    assert run(engine_of(method), requests) == [expected(i) for i in range(len(SOURCES))]


@pytest.mark.parametrize("method", often(DRAFTINGS, ["other"]))
def test_rows_that_join_keep_their_sources(method):
    random = np.random.default_rng(3)
    hot = SamplingParams(max_tokens=12, temperature=1.1)
    requests = [
        request([0], params, source=source, seed=i)
        for i, (source, params) in enumerate(
            (source, params) for source in SOURCES for params in (GREEDY, hot)
        )
    ]
    requests = [dataclasses.replace(each, max_length=13) for each in requests]
    engine = engine_of(method)
    alone = [
        drive(engine, [each], 1, lambda low, high: high, room_for=requests)[0] for each in requests
    ]
    joined = drive(engine, requests, 3, lambda low, high: int(random.integers(low, high + 1)))
    assert joined == alone


@pytest.mark.slow
def test_sampled_tokens_have_the_targets_joint_distribution():
    rows, length = 8192, 3
    target = tiny_model(0, vocab_size=8, embed_size=16, num_layers=1, encoder_layers=1)
    draft = tiny_model(1, vocab_size=8, embed_size=16, num_layers=1, encoder_layers=1)
    engine = make_engine("other", target, draft, lookahead=length)
    params = SamplingParams(max_tokens=length, temperature=0.8, top_p=0.95)
    source = [1, 2, 3, 5, 1]
    found = run(engine, [request([0], params, source=source, seed=i) for i in range(rows)])
    observed = np.zeros((8,) * length)
    np.add.at(observed, tuple(np.array(found).T), 1)
    joint = ReferenceDecoder(target, source).joint([0], length, params)
    assert chi_square(observed, joint) > 1e-6


def test_a_draft_may_share_the_targets_encoder():
    """Another decoder for the same encoder drafts the same from either's output."""
    draft = tiny_model(1, num_layers=1, encoder_layers=2)
    draft = draft.with_weights({name: TARGET.weights[name] for name in draft.weights})
    requests = [request([0], GREEDY, source=each) for each in SOURCES]
    engines = [
        Engine(
            TARGET,
            DraftModel(draft, 3, shares_encoder=shared),
            Constant(3),
            "token",
            max_model_len=512,
        )
        for shared in (False, True)
    ]
    batches = [engine.start(requests) for engine in engines]
    for batch in batches:
        while batch.running:
            batch.advance(100)
    own, shared = (batch.state.counters.accepted.tolist() for batch in batches)
    assert own == shared and sum(own) > 0


def test_prompt_lookup_searches_the_source():
    tokens = jnp.zeros((2, 8), jnp.int32).at[:, 1].set(6)
    lengths = jnp.array([2, 2], jnp.int32)
    source = EncoderInput(jnp.array([[5, 6, 7, 8], [5, 1, 6, 9]], jnp.int32), jnp.array([4, 3]))
    drafter = PromptLookup(3, 2)
    state = drafter.init(DrafterPrompt(tokens, lengths, source=source))
    draft = drafter.propose(state, _context(tokens, lengths))[0]
    assert draft.lengths.tolist() == [2, 0]  # in the second row nothing follows the match
    assert draft.tokens[0, :2].tolist() == [7, 8]


def _context(tokens, lengths):
    keys = jax.random.split(jax.random.key(0), len(lengths))
    sampling = BatchSampling.stack([SamplingParams()] * len(lengths), VOCAB)
    return Context(tokens, lengths, lengths, keys, sampling, jnp.full_like(lengths, 3))


@pytest.mark.parametrize("method", ["other", "early_exit"])
@pytest.mark.slow
def test_on_a_mesh_of_four(method):
    layout = Layout("four", (("data", 2), ("model", 2)), "cpu", **_rules())
    placement = layout.place("target", TARGET.config.axis_sizes)
    target, draft = TARGET.place(placement), DRAFT.place(placement)
    requests = [request([0], GREEDY, source=source) for source in SOURCES]
    engine = make_engine(method, target, draft, lookahead=3)
    assert run(engine, requests) == [expected(i) for i in range(len(SOURCES))]


def _rules():
    rules = (*Layout.tensor_parallel(2).target, ("batch", Rule(("data",))))
    return {"target": rules, "draft": rules}


@pytest.mark.slow
def test_the_audit_knows_sources():
    starts = [RequestInput([0], np.array(source, np.int32)) for source in SOURCES[:3]]
    assert audit(engine_of("other"), starts, samples=512).passed
    assert audit(engine_of("other"), SOURCES[:3], samples=512).passed  # as a user gives them
