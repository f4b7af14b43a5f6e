"""Rows whose prompts the drafter did not read decode plainly, beside rows that draft."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.config import SamplingParams
from spec_jax.decoding.adaptive import Adaptive
from spec_jax.engine.batch_shape import BatchShape
from spec_jax.engine.cost_profiling import PROMPTS_A_CHECK, CostProfiler
from spec_jax.testing import ReferenceDecoder, tiny_model
from tests.harness import completions, finish, make_engine, request

TARGET = tiny_model(0)
REFERENCE = ReferenceDecoder(TARGET)
PARAMS = SamplingParams(max_tokens=40)
LONG = np.random.default_rng(0).integers(0, 16, 90).tolist()
"""A prompt of more than one block."""


@pytest.fixture(scope="module")
def engine():
    """The target drafts for itself, so that every draft is accepted."""
    engine = make_engine("self", TARGET, lookahead=3, policy=Adaptive(3))
    engine.cost_profiler.advance = lambda key, state, rounds, rows, advance: advance(
        state, rounds, rows
    )
    return engine


def force(batch, lookahead):
    draft_length = dataclasses.replace(batch.state.draft_length, forced=jnp.int32(lookahead))
    batch.state = dataclasses.replace(batch.state, draft_length=draft_length)


def counted(batch, slots):
    counters = batch.state.counters
    return [(int(counters.drafted[slot]), int(counters.accepted[slot])) for slot in slots]


def test_a_row_that_skipped_its_prompt_decodes_plainly(engine, monkeypatch):
    requests = [request(LONG, PARAMS), request([3, 1, 4], PARAMS)]
    monkeypatch.setattr(engine.cost_profiler, "expects_drafts", lambda key: False)
    batch = engine.start(requests)
    force(batch, 3)
    finish(batch)
    assert counted(batch, range(2)) == [(0, 0)] * 2
    assert batch.state.drafter.lengths.tolist() == [0, 0]
    assert completions(batch, requests) == [
        REFERENCE.greedy(each.prompt_token_ids, PARAMS)[0] for each in requests
    ]


def test_a_drafter_reads_what_a_copied_prefix_lacks(engine, monkeypatch):
    """The next request begins like the text of a slot that the drafter has not read."""
    first, other = request(LONG, PARAMS), request([3, 1, 4], PARAMS)
    monkeypatch.setattr(engine.cost_profiler, "expects_drafts", lambda key: False)
    batch = engine.open([first, other], 2)
    batch.insert({0: first})
    finish(batch)
    text = completions(batch, [first])[0]
    monkeypatch.setattr(engine.cost_profiler, "expects_drafts", lambda key: True)
    longer = request([*LONG, *text[:30]], PARAMS)
    batch.insert({0: longer, 1: other})
    assert batch.num_cached_tokens(0) > 0
    force(batch, 3)
    finish(batch)
    assert all(drafted == accepted > 20 for drafted, accepted in counted(batch, range(2)))
    assert completions(batch, [longer, other]) == [
        REFERENCE.greedy(each.prompt_token_ids, PARAMS)[0] for each in (longer, other)
    ]


LOOP = BatchShape(1, 128, 0)


def test_prompts_are_read_where_drafts_pay_or_nothing_is_measured():
    profiler = CostProfiler(Adaptive(8))
    assert profiler.expects_drafts(LOOP)
    profiler.costs[str(LOOP)] = np.array([1.0, 1.1, 1.2, 1.4, 1.8])
    assert all(profiler.expects_drafts(LOOP) for _ in range(2 * PROMPTS_A_CHECK))
    profiler.costs[str(LOOP)] = np.array([1.0, 2.0, 3.0, 5.0, 9.0])
    reads = [profiler.expects_drafts(LOOP) for _ in range(2 * PROMPTS_A_CHECK)]
    assert sum(reads) == 2 and reads[PROMPTS_A_CHECK - 1]
