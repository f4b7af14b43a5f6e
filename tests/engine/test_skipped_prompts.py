"""Rows whose prompts the drafter did not read decode plainly, beside rows that draft."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.config import SamplingParams
from spec_jax.decoding.adaptive import Adaptive
from spec_jax.engine.batch_shape import BatchShape
from spec_jax.engine.cost_profiling import PROMPTS_A_CHECK, CostProfiler, Load
from spec_jax.engine.requests import PADDING
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
    monkeypatch.setattr(engine.cost_profiler, "expects_drafts", lambda *_: False)
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
    monkeypatch.setattr(engine.cost_profiler, "expects_drafts", lambda *_: False)
    batch = engine.open([first, other], 2)
    batch.insert({0: first})
    finish(batch)
    text = completions(batch, [first])[0]
    monkeypatch.setattr(engine.cost_profiler, "expects_drafts", lambda *_: True)
    longer = request([*LONG, *text[:30]], PARAMS)
    batch.insert({0: longer, 1: other})
    assert batch.num_cached_tokens(0) > 0
    force(batch, 3)
    finish(batch)
    assert all(drafted == accepted > 20 for drafted, accepted in counted(batch, range(2)))
    assert completions(batch, [longer, other]) == [
        REFERENCE.greedy(each.prompt_token_ids, PARAMS)[0] for each in (longer, other)
    ]


LOOP = Load(BatchShape(1, 128, 0), 1)


COSTS = np.array([1.0, 1.1, 1.2, 1.4, 1.8])


def some(prompt, answer):
    return request([1] * prompt, SamplingParams(max_tokens=answer))


def test_prompts_are_read_where_drafts_pay_or_nothing_is_measured():
    profiler, rows = CostProfiler(Adaptive(8), share=0.5), [some(10, 20)]
    assert profiler.expects_drafts(LOOP, rows, 1)
    profiler.costs[str(LOOP)] = COSTS
    assert all(profiler.expects_drafts(LOOP, rows, 1) for _ in range(2 * PROMPTS_A_CHECK))
    profiler.costs[str(LOOP)] = np.array([1.0, 2.0, 3.0, 5.0, 9.0])
    # Not even the best drafts would pay, so there is nothing to check.
    assert not any(profiler.expects_drafts(LOOP, rows, 1) for _ in range(2 * PROMPTS_A_CHECK))
    profiler.costs[str(LOOP)], profiler.acceptances["greedy"].accepted = COSTS, 0.0
    reads = [profiler.expects_drafts(LOOP, rows, 1) for _ in range(2 * PROMPTS_A_CHECK)]
    assert sum(reads) == 2 and reads[PROMPTS_A_CHECK - 1]
    # A drafter that has to read every prompt, or reads none, is always told to.
    profiler.reading = None
    assert all(profiler.expects_drafts(LOOP, rows, 1) for _ in range(3))


def test_a_long_prompt_is_read_where_its_answer_makes_up_for_it():
    profiler = CostProfiler(Adaptive(8), share=0.5)
    profiler.costs[str(LOOP)] = COSTS
    # The target reads a token in 0.1 s, the drafter in 0.05; of a round of 1 s half is saved.
    alone = dataclasses.replace(some(101, 1), may_draft=False)
    profiler.record_reading([some(101, 1), PADDING], 0, 15.0)
    profiler.record_reading([PADDING, alone, alone], 100, 10.0)
    assert profiler.reading.drafter_seconds(300) == pytest.approx(15)
    saved = Adaptive(8).seconds_saved(Adaptive.prior_rate, COSTS)
    assert 0.5 < saved < 0.75
    assert profiler.expects_drafts(LOOP, [some(300, 33)], 1)
    assert not profiler.expects_drafts(LOOP, [some(300, 15)], 1)
    # Half of the time that a row of two saves is the other's.
    assert not profiler.expects_drafts(LOOP, [some(300, 33)], 2)
    assert profiler.expects_drafts(LOOP, [some(300, 33), some(10, 33)], 2)
    # However long an answer may be, the last ones were short.
    for _ in range(20):
        profiler.acceptances["greedy"].add_answers(np.array([13, 17]), np.array([False, False]))
    assert not profiler.expects_drafts(LOOP, [some(300, 200)], 1)
    assert profiler.expects_drafts(LOOP, [some(100, 200)], 1)
    # An answer that was cut short says nothing of how long it would have become.
    before = profiler.acceptances["greedy"].answer
    profiler.acceptances["greedy"].add_answers(np.array([5]), np.array([True]))
    assert profiler.acceptances["greedy"].answer == pytest.approx(before)


def test_the_time_of_prompts_and_the_length_of_answers_are_measured():
    engine = make_engine("self", TARGET, lookahead=3, policy=Adaptive(3))
    profiler, requests = engine.cost_profiler, [request(LONG, PARAMS), request([3, 1, 4], PARAMS)]
    assert profiler.reading.share == 1.0  # the target drafts for itself
    before = profiler.acceptances["greedy"].answer
    batch = engine.start(requests)
    assert profiler.reading.num_tokens == len(LONG) - 1 + 2
    assert 0 < 2 * profiler.reading.seconds <= batch.seconds.prefill
    finish(batch)
    tokens = [len(each) for each in completions(batch, requests)]
    assert tokens == [40, 40] and profiler.acceptances["greedy"].answer == before  # cut
