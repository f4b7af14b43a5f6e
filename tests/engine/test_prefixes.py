"""Prompts are read in chunks beside a stream, and only as far as no slot has computed them."""

import dataclasses

import numpy as np
import pytest

from spec_jax.config import SamplingParams
from spec_jax.decoding.adaptive import Adaptive
from spec_jax.decoding.draft_length import Confidence, Heuristic
from spec_jax.engine import batch_shape
from spec_jax.engine.rows import RowPrograms
from spec_jax.engine.scheduler import Scheduler
from spec_jax.models.model import Model
from tests.harness import DRAFT, DRAFTINGS, TARGET, make_engine, request
from tests.often import often
from tests.reshaped import reshaped

VOCAB = TARGET.config.vocab_size
METHODS = [*DRAFTINGS, "other, varying"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(batch_shape, "CPU_BLOCK", 32)


def text(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def run(scheduler, requests, **options):
    """The output of each request, in order."""
    numbers = [scheduler.add(each, **options) for each in requests]
    outputs = {}
    while scheduler.busy:
        for number, chunk in scheduler.step():
            if chunk.output is not None:
                outputs[number] = chunk.output
    return [outputs[number] for number in numbers]


def alone(engine, requests):
    return [run(Scheduler(engine, 1), [each])[0].token_ids for each in requests]


@pytest.mark.parametrize("method", often(METHODS, ["other"]))
def test_a_common_beginning_is_computed_once_a_slot_at_most(method):
    engine = make_engine(method, TARGET, DRAFT, lookahead=3)
    params = SamplingParams(max_tokens=6), SamplingParams(max_tokens=9, temperature=0.8)
    prompts = [text(0, 100) + text(i, 3 + 5 * i) for i in range(1, 9)]
    requests = [request(each, params[i % 2], seed=i) for i, each in enumerate(prompts)]
    expected = alone(engine, requests)
    outputs = run(Scheduler(engine, 2), requests)
    assert [each.token_ids for each in outputs] == expected
    cached = [each.num_cached_tokens for each in outputs]
    assert cached[0] == 0 and min(cached[1:]) >= 96


POLICIES = [Heuristic(3, start=2), Confidence(3, 0.3, retune=True), Adaptive(3)]


@pytest.mark.parametrize("policy", often(POLICIES, [POLICIES[-1]]), ids=lambda p: type(p).__name__)
def test_a_common_beginning_is_copied_whatever_chooses_k(policy):
    engine = make_engine("other", TARGET, DRAFT, lookahead=3, policy=policy)
    requests = [request(text(0, 100) + text(i, 5), SamplingParams(max_tokens=9)) for i in range(4)]
    expected = alone(engine, requests)
    outputs = run(Scheduler(engine, 2), requests)
    assert [each.token_ids for each in outputs] == expected
    assert min(each.num_cached_tokens for each in outputs[1:]) >= 96


@pytest.mark.parametrize("method", often(METHODS, ["other"]))
def test_an_answer_that_is_continued_is_not_read_again(method):
    """The batch stays while nothing runs, until a request needs another shape."""
    engine = make_engine(method, TARGET, DRAFT, lookahead=3)
    scheduler, params = Scheduler(engine, 2), SamplingParams(max_tokens=40)
    first = run(scheduler, [request(text(1, 50), params)])[0]
    longer = request([*text(1, 50), *first.token_ids, *text(2, 20)], params)
    expected = alone(engine, [longer])
    second = run(scheduler, [longer])[0]
    assert [second.token_ids] == expected
    assert second.num_cached_tokens == 64
    assert run(scheduler, [request(text(3, 50), params)])[0].num_cached_tokens == 0


@pytest.mark.parametrize("window", [None, 16])
def test_a_slot_that_runs_or_a_ring_is_copied_only_as_far_as_it_can_be(window):
    target = TARGET
    if window is not None:
        config = reshaped(TARGET.config, sliding_window=window)
        shape = Model.abstract(config, dtype=TARGET.dtype)
        target = dataclasses.replace(shape, params=TARGET.params)
    engine = make_engine("prompt_lookup", target, lookahead=3)
    params = SamplingParams(max_tokens=30)
    requests = [request(text(1, 70 + 30 * i) + text(i, 5), params, seed=i) for i in range(4)]
    expected = alone(engine, requests)
    scheduler, outputs = Scheduler(engine, 4), {}
    for i, each in enumerate(requests):
        assert scheduler.add(each) == i
        for number, chunk in scheduler.step():
            outputs[number] = chunk.output
    while scheduler.busy:
        for number, chunk in scheduler.step():
            outputs[number] = chunk.output
    assert [outputs[i].token_ids for i in range(4)] == expected


@pytest.mark.parametrize("method", often(METHODS, ["prompt_lookup"]))
def test_a_stream_decodes_a_round_for_each_chunk_of_a_prompt(method, monkeypatch):
    engine = make_engine(method, TARGET, DRAFT, lookahead=2)
    short = request([1, 2, 3], SamplingParams(max_tokens=300))
    long = [request(text(i, 200), SamplingParams(max_tokens=5), seed=i) for i in (1, 2)]
    expected = alone(engine, [short, *long])
    scheduler, chunks = Scheduler(engine, 4), []
    read = RowPrograms.read_chunk
    monkeypatch.setattr(RowPrograms, "read_chunk", lambda *args: chunks.append(0) or read(*args))
    stream = scheduler.add(short, streaming=True)
    scheduler.step()
    numbers = [scheduler.add(each) for each in long]
    outputs, tokens_between = {}, []
    while scheduler.busy:
        before = len(chunks)
        step = scheduler.step()
        assert len(chunks) <= before + 1
        if len(chunks) > before:
            tokens_between.append(sum(len(c.token_ids) for n, c in step if n == stream))
        outputs |= {number: chunk.output for number, chunk in step if chunk.output is not None}
    assert len(chunks) == 2 * 7  # of 32 tokens
    assert min(tokens_between) >= 1
    assert [outputs[number].token_ids for number in (stream, *numbers)] == expected


def test_what_is_cancelled_while_its_prompt_is_read_frees_its_slot():
    engine = make_engine("other", TARGET, DRAFT, lookahead=2)
    scheduler = Scheduler(engine, 2)
    stream = scheduler.add(request([1, 2, 3], SamplingParams(max_tokens=90)), streaming=True)
    scheduler.step()
    long = scheduler.add(request(text(1, 200), SamplingParams(max_tokens=5)))
    scheduler.step()
    assert scheduler.batch.reading
    scheduler.cancel(long)
    reasons = {number: chunk.output for number, chunk in scheduler.step()}
    assert reasons[long].finish_reason == "abort" and not scheduler.batch.reading
    other = request(text(2, 200), SamplingParams(max_tokens=5))
    number, outputs = scheduler.add(other), {}
    while scheduler.busy:
        outputs |= {number: chunk.output for number, chunk in scheduler.step()}
    assert outputs[number].token_ids == alone(engine, [other])[0]
    assert len(outputs[stream].token_ids) == 90


def test_parts_of_prompts_are_read_by_programs_that_are_traced_once():
    engine = make_engine("prompt_lookup", TARGET)

    def schedule(seed):
        scheduler = Scheduler(engine, 2)
        params = SamplingParams(max_tokens=20)
        prompts = [text(seed, 100), text(seed, 70) + text(1, 9), text(seed, 100) + text(2, 5)]
        run(scheduler, [request(each, params) for each in prompts], streaming=True)

    schedule(0)
    traces = engine.traces
    schedule(1)
    assert engine.traces == traces


def test_several_short_prompts_are_read_in_the_time_of_one_chunk(monkeypatch):
    """As many as a chunk has tokens, so that requests that come together soon run together."""
    monkeypatch.setattr(batch_shape, "CPU_BLOCK", 64)
    engine, params = make_engine("prompt_lookup", TARGET, lookahead=2), SamplingParams(max_tokens=9)
    requests = [request(text(i, 9), params, seed=i) for i in range(3)]
    expected = alone(engine, requests)
    scheduler = Scheduler(engine, 4)
    stream = request([1, 2, 3], SamplingParams(max_tokens=60))
    scheduler.add(stream, streaming=True)
    scheduler.step()
    numbers = [scheduler.add(each) for each in requests]
    outputs = {number: chunk.output for number, chunk in scheduler.step()}
    assert len(scheduler.batch.reading) == 1
    while scheduler.busy:
        outputs |= {number: chunk.output for number, chunk in scheduler.step()}
    assert [outputs[number].token_ids for number in numbers] == expected


def test_computed_tokens_of_a_prompt_are_counted_exactly():
    engine, params = make_engine("none", TARGET), SamplingParams(max_tokens=90)
    scheduler = Scheduler(engine, 2)
    scheduler.add(request([1, 2, 3], params), streaming=True)
    scheduler.step()
    scheduler.add(request(text(1, 75), params))
    counts = []
    while not counts or scheduler.batch.reading:
        scheduler.step()
        counts += scheduler.batch.reading.values()
    assert counts == [32, 64]


def test_a_batch_that_is_started_frees_the_idle_one():
    engine, params = make_engine("none", TARGET), SamplingParams(max_tokens=3)
    scheduler = Scheduler(engine, 2)
    run(scheduler, [request([1, 2], params)])
    assert scheduler.batch is not None
    engine.start([request([1, 2], params)])
    assert scheduler.batch is None
