"""The open scheduler: requests come and go at any time, and each says what it says alone."""

import functools

import jax
import numpy as np
import pytest

from spec_jax.config import SamplingParams
from spec_jax.engine import batch_shape, prefill_queue
from spec_jax.engine import engine as engine_module
from spec_jax.engine import scheduler as scheduler_module
from spec_jax.engine.dispatcher import Device, Dispatcher
from spec_jax.engine.engine import Engine
from spec_jax.engine.programs import GROW
from spec_jax.engine.rows import RowPrograms
from spec_jax.engine.scheduler import Scheduler
from spec_jax.engine.sequence import Origin
from spec_jax.sampling.parameters import SamplingFeatures
from tests.harness import DRAFT, DRAFTINGS, TARGET, make_engine, request
from tests.often import often

VOCAB = TARGET.config.vocab_size
MASKED = dict.fromkeys(range(VOCAB), float("-inf"))
COMMON = np.random.default_rng(1).integers(0, VOCAB, 100).tolist()
"""What many prompts begin with."""
VOCAB_TEXT = np.random.default_rng(2).integers(0, VOCAB, 400).tolist()
SCHEDULES, FEW = 28, 12
"""A method; more than three hundred over all of them."""
EVERY_FEATURE = SamplingFeatures(random=True, cut=True, history=True)
METHODS = [*DRAFTINGS, "other, varying"]


@pytest.fixture(autouse=True)
def small_capacities(monkeypatch):
    """More steps of the ladder for short texts, and more chunks."""
    monkeypatch.setattr(engine_module, "MIN_CAPACITY", 64)
    monkeypatch.setattr(batch_shape, "CPU_BLOCK", 32)


def random_request(random: np.random.Generator, seed: int):
    """One of many kinds: greedy, sampled, penalised, tiny, long, without any distribution."""
    kind = random.integers(6)
    params = [
        SamplingParams(max_tokens=int(random.integers(8, 30))),
        SamplingParams(max_tokens=int(random.integers(8, 30)), temperature=0.9, top_p=0.9),
        SamplingParams(max_tokens=20, temperature=1.3, presence_penalty=1.5, min_tokens=4),
        SamplingParams(max_tokens=1, temperature=0.5),
        SamplingParams(max_tokens=12, logit_bias=MASKED),
        SamplingParams(max_tokens=70, repetition_penalty=1.7, logit_bias={3: 5.0}),
    ][kind]
    prompt = random.integers(0, VOCAB, random.integers(1, 60 if random.random() < 0.2 else 20))
    common = COMMON[: random.integers(40, 100)] if random.random() < 0.4 else []
    return request(
        [*common, *prompt.tolist()],
        params,
        stop_token_ids=(5,) * (seed % 2),
        bad_words=[[1, 2]] if random.random() < 0.2 else (),
        seed=seed,
    )


@functools.cache
def case(method: str):
    """An engine, requests, and what each of them says alone."""
    engine, random = make_engine(method, TARGET, DRAFT, lookahead=3), np.random.default_rng(0)
    requests = [random_request(random, seed) for seed in range(16)]
    return engine, requests, [outputs_of(Scheduler(engine, 1), [each])[0] for each in requests]


def outputs_of(scheduler, requests):
    """What each request says, in order."""
    numbers = [scheduler.add(each) for each in requests]
    outputs = {}
    while scheduler.busy:
        for number, chunk in scheduler.step():
            if chunk.output is not None:
                outputs[number] = chunk.output.token_ids, chunk.output.finish_reason
    return [outputs[number] for number in numbers]


def play(scheduler, requests, random):
    """A random schedule; returns the outputs by request, and which were cancelled."""
    waiting = list(random.permutation(len(requests)))
    added, outputs, pieces, cancelled = {}, {}, {}, set()
    while waiting or scheduler.busy:
        for _ in range(int(random.integers(0, 4))):
            if waiting:
                i = waiting.pop()
                added[scheduler.add(requests[i], streaming=bool(random.integers(2)))] = i
        if added and random.random() < 0.15:
            number = int(random.choice(list(added)))
            if added[number] not in outputs:
                scheduler.cancel(number)
                cancelled.add(added[number])
        for number, chunk in scheduler.step():
            i = added[number]
            assert i not in outputs, "nothing follows an output"
            pieces.setdefault(i, []).extend(chunk.token_ids)
            if chunk.output is not None:
                outputs[i] = chunk.output.token_ids, chunk.output.finish_reason
                assert tuple(pieces[i]) == outputs[i][0]
        assert scheduler.num_running <= scheduler.max_num_seqs
    return outputs, cancelled


def check_schedule(method: str, seed: int, max_num_seqs: int, engine: Engine | None = None) -> None:
    own_engine, requests, alone = case(method)
    engine = engine or own_engine
    random = np.random.default_rng(seed)
    some = sorted(random.choice(len(requests), int(random.integers(3, 12)), replace=False))
    outputs, cancelled = play(Scheduler(engine, max_num_seqs), [requests[i] for i in some], random)
    assert sorted(outputs) == list(range(len(some)))
    for at, i in enumerate(some):
        token_ids, reason = outputs[at]
        expected, expected_reason = alone[i]
        if reason == "abort":
            assert at in cancelled
            assert token_ids == expected[: len(token_ids)]
        else:
            assert (token_ids, reason) == (expected, expected_reason), (method, seed, i)


@pytest.mark.parametrize(
    ("method", "schedules"),
    often([*((method, SCHEDULES) for method in METHODS), ("other", FEW)], [("other", FEW)]),
)
def test_random_schedules_change_no_token(method, schedules, monkeypatch):
    """All steps of sampling in every program, so that there are few of them."""
    monkeypatch.setattr(Engine, "features", lambda engine, requests: EVERY_FEATURE)
    monkeypatch.setattr(scheduler_module, "ROUNDS_PER_STEP", 5)
    monkeypatch.setattr(scheduler_module, "ROUNDS_PER_CHUNK", 2)
    for seed in range(schedules):
        check_schedule(method, seed, max_num_seqs=1 + seed % 3)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("method", ["prompt_lookup", "other"])
def test_random_schedules_change_no_token_in_programs_of_their_features(method, monkeypatch):
    """Programs have only the sampling steps that the running requests need: there are many."""
    monkeypatch.setattr(scheduler_module, "ROUNDS_PER_STEP", 5)
    monkeypatch.setattr(scheduler_module, "ROUNDS_PER_CHUNK", 2)
    for seed in range(100, 160):
        check_schedule(method, seed, max_num_seqs=1 + seed % 5)


@pytest.mark.parametrize(
    ("method", "schedules"),
    often([*((method, 12) for method in METHODS), ("prompt_lookup", 8)], [("prompt_lookup", 8)]),
)
def test_random_schedules_in_batches_of_one_shape_change_no_token(method, schedules, monkeypatch):
    """A server's batches: all of one shape, into which short prompts come in short rows."""
    monkeypatch.setattr(Engine, "features", lambda engine, requests: EVERY_FEATURE)
    monkeypatch.setattr(scheduler_module, "ROUNDS_PER_CHUNK", 2)
    monkeypatch.setattr(prefill_queue, "SHORT_PROMPT", 64)
    engine = make_engine(method, TARGET, DRAFT, lookahead=3)
    engine.reserve(250, 4)
    shapes, insert = set(), RowPrograms.insert
    monkeypatch.setattr(
        RowPrograms,
        "insert",
        lambda self, batch, shape, slots, rows: (
            shapes.add((shape.batch, rows.state.tokens.shape[1], batch.state.tokens.shape[1])),
            insert(self, batch, shape, slots, rows),
        )[1],
    )
    for seed in range(schedules):
        check_schedule(method, seed, 4, engine)
    assert {batch for batch, _, _ in shapes} == {4}
    assert {(short, full) for _, short, full in shapes} == {(64, 256), (256, 256)}


def test_a_short_prompt_waits_for_one_block_of_a_long_one(monkeypatch):
    engine = make_engine("prompt_lookup", TARGET)
    engine.reserve(400, 4)
    scheduler, blocks = Scheduler(engine, 4), []
    read = RowPrograms.read_chunk
    monkeypatch.setattr(RowPrograms, "read_chunk", lambda *args: blocks.append(0) or read(*args))
    params = SamplingParams(max_tokens=5)
    long = [request(VOCAB_TEXT[i : i + 300], params) for i in (0, 7)]
    expected = [outputs_of(Scheduler(make_engine("none", TARGET), 1), [each])[0] for each in long]
    numbers = [scheduler.add(each, streaming=True) for each in long]
    scheduler.step()
    short = scheduler.add(request([1, 2, 3], params), streaming=True)
    read_before, outputs = len(blocks), {}
    while short not in outputs:
        outputs |= dict(scheduler.step())
    assert len(blocks) <= read_before + 2
    assert len(scheduler.batch.reading) == 2
    while scheduler.busy:
        outputs |= {number: chunk.output for number, chunk in scheduler.step()}
    assert [(outputs[n].token_ids, outputs[n].finish_reason) for n in numbers] == expected
    assert len(blocks) == 2 * 10  # of 32 tokens: the longer prompts are not read twice


@pytest.mark.parametrize("method", often(METHODS, ["prompt_lookup"]))
def test_a_running_batch_grows_and_its_rows_notice_nothing(method, monkeypatch):
    """More rows, longer texts, more stop tokens, log-probabilities: each is a compiled copy."""
    monkeypatch.setattr(scheduler_module, "ROUNDS_PER_STEP", 2)
    engine = make_engine(method, TARGET, DRAFT, lookahead=3)
    requests = [
        request([1, 2, 3, 1, 2], SamplingParams(max_tokens=40)),
        request([4, 5], SamplingParams(max_tokens=40, temperature=0.8), seed=2),
        request([7] * 50, SamplingParams(max_tokens=90), seed=3),
        request([8, 9], SamplingParams(max_tokens=30), stop_token_ids=tuple(range(20, 32))),
        request([8, 9], SamplingParams(max_tokens=30, logprobs=2)),
    ]
    alone = [outputs_of(Scheduler(engine, 1), [each])[0] for each in requests]
    scheduler, outputs, shapes = Scheduler(engine, 8), {}, []
    for each in [*requests, None, None]:
        if each is not None:
            scheduler.add(each)
        for number, chunk in scheduler.step():
            if chunk.output is not None:
                outputs[number] = chunk.output
        shapes.append(scheduler.batch.shape)
    batches, capacities = (
        [getattr(each, name) for each in shapes] for name in ("batch", "capacity")
    )
    assert batches[:5] == [1, 2, 4, 4, 8] and capacities[0] < capacities[2]
    assert shapes[3].stops > shapes[2].stops and shapes[4].logprobs is not None
    assert len(engine.compiler.programs(GROW)) == 4
    while scheduler.busy:
        for number, chunk in scheduler.step():
            if chunk.output is not None:
                outputs[number] = chunk.output
    found = [(outputs[i].token_ids, outputs[i].finish_reason) for i in range(len(requests))]
    assert found == alone
    assert len(outputs[4].outputs[0].logprobs) == len(outputs[4].token_ids)


def test_nothing_is_traced_once_the_ladder_is_warm(monkeypatch):
    monkeypatch.setattr(scheduler_module, "ROUNDS_PER_STEP", 3)
    engine = make_engine("prompt_lookup", TARGET)
    params = [SamplingParams(max_tokens=9 + i, temperature=i % 2) for i in range(8)]

    def schedule():
        scheduler = Scheduler(engine, 4)
        for i, each in enumerate(params):
            scheduler.add(request([1, 2, i], each, seed=i))
            scheduler.step()
        while scheduler.busy:
            scheduler.step()

    schedule()
    traces = engine.traces
    schedule()
    assert engine.traces == traces


def test_finished_requests_are_reported_in_their_order_whichever_ends_first(monkeypatch):
    monkeypatch.setattr(scheduler_module, "ROUNDS_PER_STEP", 2)
    reported = []
    engine = make_engine("none", TARGET)
    scheduler = Scheduler(engine, 3, None, lambda each, ids: reported.append((each, len(ids))))
    requests = [request([1, 2, i], SamplingParams(max_tokens=n)) for i, n in enumerate((9, 3, 6))]
    for each in requests:
        scheduler.add(each)
    while scheduler.busy:
        scheduler.step()
    lengths = [count for _, count in reported]
    assert [each for each, _ in reported] == requests and lengths == [9, 3, 6]


def test_what_is_cancelled_frees_its_slot_within_one_step(monkeypatch):
    monkeypatch.setattr(scheduler_module, "ROUNDS_PER_STEP", 2)
    engine = make_engine("prompt_lookup", TARGET)
    scheduler = Scheduler(engine, 2)
    long = SamplingParams(max_tokens=60)
    numbers = [scheduler.add(request([1, 2, i], long, seed=i)) for i in range(4)]
    scheduler.step()
    scheduler.cancel(numbers[0])  # which runs
    scheduler.cancel(numbers[3])  # which waits
    chunks = dict(scheduler.step())
    assert scheduler.num_running == 2 and numbers[2] in chunks
    for number in (numbers[0], numbers[3]):
        assert chunks[number].output.finish_reason == "abort"
    assert len(chunks[numbers[0]].output.token_ids) > 0
    assert chunks[numbers[3]].output.token_ids == ()
    scheduler.cancel(numbers[0])  # it has ended: nothing happens
    outputs = [c.output for _, c in scheduler.step() if c.output is not None]
    assert outputs == []
    for number in numbers[1:3]:
        scheduler.cancel(number)
    assert len(scheduler.step()) == 2
    assert not scheduler.busy and scheduler.num_running == 0


def test_an_idle_batch_keeps_its_memory_until_another_of_the_device_decodes():
    engine, device = make_engine("prompt_lookup", TARGET), Device()
    one, other = (Dispatcher(Scheduler(engine, 2), device) for _ in range(2))
    entries = [(request([1, 2], SamplingParams(max_tokens=3)), Origin())]
    for dispatcher in (one, one, other):
        assert len(list(dispatcher.chunks(entries, streaming=True))) >= 1
        assert dispatcher.scheduler.batch is not None and dispatcher.scheduler.step() == []
    assert one.scheduler.batch is None
    other.scheduler.release()
    assert other.scheduler.batch is None


def test_steps_of_sampling_that_nobody_needs_are_left_out_after_some_time(monkeypatch):
    monkeypatch.setattr(scheduler_module, "ROUNDS_PER_STEP", 1)
    monkeypatch.setattr(scheduler_module, "FEATURE_STEPS", 4)
    engine = make_engine("prompt_lookup", TARGET)
    scheduler = Scheduler(engine, 2)
    warm = SamplingParams(max_tokens=2, temperature=1.0)
    scheduler.add(request([1, 2], SamplingParams(max_tokens=60)))
    scheduler.add(request([1, 2], warm))
    seen = []
    while scheduler.busy:
        scheduler.step()
        if scheduler.batch is not None:
            seen.append(scheduler.batch.shape.features.random)
    assert seen[0] and not seen[-1] and 4 <= sum(seen) <= 8


def test_a_failure_ends_all_requests_and_the_next_ones_run(monkeypatch):
    engine = make_engine("prompt_lookup", TARGET)
    scheduler = Scheduler(engine, 2)
    expected = outputs_of(scheduler, [request([1, 2], SamplingParams(max_tokens=9))])
    scheduler.add(request([1, 2], SamplingParams(max_tokens=9)))

    def broken(*args):
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr("spec_jax.engine.batch.Batch.advance", broken)
        with pytest.raises(RuntimeError, match="the device is gone"):
            scheduler.step()
    scheduler.reset()
    assert not scheduler.busy
    assert outputs_of(scheduler, [request([1, 2], SamplingParams(max_tokens=9))]) == expected


def test_arrays_are_copied_by_growth_alone():
    """A round, and the insertion of a row, leave the caches where they are."""
    engine = make_engine("self", TARGET, lookahead=2)
    scheduler = Scheduler(engine, 4)
    for i in range(6):
        scheduler.add(request([1, 2, i], SamplingParams(max_tokens=4 + 3 * i), seed=i))
    scheduler.step()
    pointers = _pointers(scheduler)
    while scheduler.busy:
        scheduler.step()
        if scheduler.batch is not None:
            assert _pointers(scheduler) == pointers


def _pointers(scheduler):
    caches = scheduler.batch.state.cache, scheduler.batch.state.drafter
    return {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(caches) if leaf.ndim == 4}
