"""The pacer: what it measures, when it puts measuring off, and what it remembers."""

import dataclasses
import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.config import SamplingParams
from spec_jax.decoding.adaptive import Adaptive
from spec_jax.decoding.state import LENGTH, RUNNING, Counters, DecodeState
from spec_jax.drafters.prompt_lookup import PromptLookup
from spec_jax.drafters.recycle import TokenRecycling
from spec_jax.drafters.suffix import SuffixLookup
from spec_jax.engine import cost_profiling as pacing
from spec_jax.engine.acceptances import FADE, PRIOR_ANSWER
from spec_jax.engine.batch_shape import BatchShape
from spec_jax.engine.cost_profiling import Load
from spec_jax.sampling.parameters import SamplingFeatures
from spec_jax.testing import tiny_model
from tests.harness import TARGET, finish, make_engine, request
from tests.quick import measured_seconds

COSTS = {0: 1.0, 1: 1.25, 2: 1.5, 4: 2.0}
LOOP, OTHER = Load(BatchShape(1, 128, 0), 1), Load(BatchShape(2, 128, 0), 2)
SAMPLED = Load(BatchShape(1, 128, 0, features=SamplingFeatures(random=True)), 1)


def state_of(policy, room):
    """A batch of one row for each entry of `room`, the tokens that it can still emit."""
    batch = len(room)
    lengths = jnp.full((batch,), 5, jnp.int32)
    cache = tiny_model(num_layers=1).new_cache(batch, 128)
    return DecodeState(
        tokens=jnp.zeros((batch, 128), jnp.int32),
        lengths=lengths,
        prompt_lengths=lengths,
        max_lengths=lengths + jnp.asarray(room, jnp.int32),
        finish=jnp.asarray([RUNNING if each else LENGTH for each in room], jnp.int32),
        keys=jnp.zeros((batch, 2), jnp.uint32),
        may_draft=jnp.ones((batch,), bool),
        cache=cache,
        drafter=None,
        draft_length=policy.init(batch),
        counters=Counters.zeros(batch, policy.num_speculative_tokens, 128),
    )


class Rounds:
    """Rounds that emit one token, and cost what a table and a clock of the test say."""

    def __init__(self, monkeypatch):
        self.now, self.forced, self.calls = 100.0, [], 0
        monkeypatch.setattr(pacing, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def __call__(self, state, rounds, min_running=1):
        self.now += 7.0  # what a call takes
        if not rounds:
            return state
        self.calls += 1
        # The first samples of each kind are slow, and so is every fifth call.
        slow = 0.4 if self.calls <= 4 or self.calls % 5 == 0 else 0.0
        for _ in range(rounds):
            running = state.finish == RUNNING
            if running.sum() < min_running:
                break
            forced = int(state.draft_length.forced)
            self.forced.append(forced)
            self.now += COSTS.get(forced, 1.0) + slow
            lengths = state.lengths + running.astype(jnp.int32)
            counters = dataclasses.replace(
                state.counters, rounds=state.counters.rounds + running.astype(jnp.int32)
            )
            finish = jnp.where(lengths >= state.max_lengths, LENGTH, RUNNING)
            state = dataclasses.replace(
                state, lengths=lengths, counters=counters, finish=finish.astype(jnp.int32)
            )
        return state


def sampled(choices):
    """The rounds of samples of these choices."""
    return [each for each in choices for _ in range(pacing.ROUNDS_A_SAMPLE)]


@pytest.fixture
def rounds(monkeypatch):
    monkeypatch.setattr(pacing._Samples, "_quickest", measured_seconds)
    return Rounds(monkeypatch)


def test_each_choice_is_measured_in_turn_and_the_quickest_round_counts(rounds):
    pacer = pacing.CostProfiler(Adaptive(4))
    state = pacer.begin(LOOP, state_of(pacer.policy, [100, 0]))
    state = pacer.advance(LOOP, state, 3, 1, rounds)
    assert rounds.forced == sampled([0, 1, 2, 4] * 4) + [-1] * 3
    np.testing.assert_allclose(pacer.costs[str(LOOP)], list(COSTS.values()))
    np.testing.assert_allclose(state.draft_length.costs, list(COSTS.values()))
    assert int(state.draft_length.forced) == -1
    # Never again for this loop; the next batch starts with what is known.
    state = pacer.begin(LOOP, state_of(pacer.policy, [50]))
    np.testing.assert_allclose(state.draft_length.costs, list(COSTS.values()))
    pacer.advance(LOOP, state, 5, 1, rounds)
    assert rounds.forced[64:] == [-1] * 8
    # Another loop has separate costs.
    pacer.advance(OTHER, pacer.begin(OTHER, state_of(pacer.policy, [100])), 1, 1, rounds)
    assert rounds.forced[72:] == [*sampled([0, 1, 2, 4] * 4), -1]
    assert set(pacer.costs) == {str(LOOP), str(OTHER)}


def test_one_slow_call_without_rounds_shortens_no_sample(rounds, monkeypatch):
    pacer = pacing.CostProfiler(Adaptive(4))
    empty = []

    def advance(state, count, min_running=1):
        if not count:
            empty.append(None)
            rounds.now += 100.0 if len(empty) % 3 == 0 else 0.0
        return rounds(state, count, min_running)

    pacer.advance(LOOP, pacer.begin(LOOP, state_of(pacer.policy, [100])), 1, 1, advance)
    np.testing.assert_allclose(pacer.costs[str(LOOP)], list(COSTS.values()))


def test_a_k_larger_than_one_that_cannot_pay_is_not_sampled(rounds, monkeypatch):
    monkeypatch.setitem(COSTS, 1, 30.0)
    pacer = pacing.CostProfiler(Adaptive(4))
    pacer.advance(LOOP, pacer.begin(LOOP, state_of(pacer.policy, [100])), 1, 1, rounds)
    assert rounds.forced == [*sampled([0, 1] * 4), -1]
    np.testing.assert_allclose(pacer.costs[str(LOOP)], [1.0, 30.0, 45.0, 75.0])


def test_a_longer_draft_takes_no_less_time_and_none_is_free(rounds, monkeypatch):
    monkeypatch.setitem(COSTS, 0, 4.0)  # other work delayed these rounds
    pacer = pacing.CostProfiler(Adaptive(4))
    pacer.advance(LOOP, pacer.begin(LOOP, state_of(pacer.policy, [100])), 1, 1, rounds)
    np.testing.assert_allclose(pacer.costs[str(LOOP)], [1.25, 1.25 * pacing.MIN_DRAFTING, 1.5, 2.0])


def test_short_requests_postpone_what_they_have_no_room_to_measure(rounds):
    pacer = pacing.CostProfiler(Adaptive(4))
    policy_costs = np.asarray(pacer.policy.init(1).costs)
    for room in (16, 20):
        state = pacer.begin(LOOP, state_of(pacer.policy, [room]))
        state = pacer.advance(LOOP, state, 100, 1, rounds)
        assert state.finish.tolist() == [LENGTH] and int(state.draft_length.forced) == -1
        np.testing.assert_array_equal(state.draft_length.costs, policy_costs)
    # Of sixteen tokens two samples could be taken; the next request takes the third choice.
    assert rounds.forced == sampled([0, 1]) + [-1] * 8 + sampled([2]) + [-1] * 16
    assert str(LOOP) not in pacer.costs
    state = pacer.begin(LOOP, state_of(pacer.policy, [100]))
    pacer.advance(LOOP, state, 1, 1, rounds)
    assert rounds.forced[36:] == [*sampled([4] + [0, 1, 2, 4] * 3), -1]
    np.testing.assert_allclose(pacer.costs[str(LOOP)], list(COSTS.values()))


def test_a_new_batch_starts_from_the_acceptances_of_those_before(rounds):
    pacer = pacing.CostProfiler(Adaptive(4))
    rate = lambda state: state.draft_length.accepted / state.draft_length.judged  # noqa: E731
    state = pacer.begin(LOOP, state_of(pacer.policy, [30, 30, 0]))
    np.testing.assert_allclose(rate(state), Adaptive.prior_rate, rtol=1e-6)
    rates = [Adaptive.prior_rate]
    for _ in range(4):
        pace = dataclasses.replace(
            state.draft_length,
            # The padding row, which no round touched, must not count.
            accepted=jnp.float32([2.0, 1.0, 90.0]),
            judged=jnp.float32([20.0, 10.0, 90.0]),
        )
        state = dataclasses.replace(state, draft_length=pace)
        state = pacer.advance(LOOP, state, 100, 1, rounds)
        pacer.record(LOOP, state, [0, 1, 2])
        state = pacer.begin(LOOP, state_of(pacer.policy, [30, 30, 0]))
        rates.append(float(rate(state)[0]))
        assert len(set(rate(state).tolist())) == 1
    assert rates == sorted(rates, reverse=True)
    assert 0.1 < rates[-1] < 0.16


def test_a_slot_that_has_become_free_does_not_wait_for_the_measuring_to_end(rounds):
    pacer = pacing.CostProfiler(Adaptive(4))
    state = pacer.begin(LOOP, state_of(pacer.policy, [100, 32]))
    state = pacer.advance(LOOP, state, 100, 2, rounds)
    assert rounds.forced == sampled([0, 1, 2, 4] * 2) and str(LOOP) not in pacer.costs
    assert state.finish.tolist() == [RUNNING, LENGTH] and int(state.draft_length.forced) == -1
    pacer.advance(LOOP, state, 1, 1, rounds)
    assert rounds.forced[32:] == [*sampled([0, 1, 2, 4] * 2), -1]
    np.testing.assert_allclose(pacer.costs[str(LOOP)], list(COSTS.values()))


def test_rows_that_may_not_draft_measure_nothing(rounds):
    pacer = pacing.CostProfiler(Adaptive(4))
    before = dataclasses.replace(pacer.acceptances["greedy"])
    state = state_of(pacer.policy, [100, 100])
    one = jnp.array([False, False])
    state = pacer.begin(LOOP, dataclasses.replace(state, may_draft=one))
    np.testing.assert_array_equal(state.draft_length.accepted, [0.0, 0.0])
    state = pacer.advance(LOOP, state, 2, 1, rounds)
    assert rounds.forced == [-1] * 2 and pacer.costs == {}
    pacer.record(LOOP, state, [0, 1])
    before.answer = pacer.acceptances["greedy"].answer
    assert pacer.acceptances["greedy"] == before  # nothing was judged
    state = dataclasses.replace(state, may_draft=one.at[1].set(True))
    pacer.advance(LOOP, state, 1, 1, rounds)
    assert rounds.forced[2:] == [*sampled([0, 1, 2, 4] * 4), -1]


def test_rows_teach_by_themselves_and_only_when_they_have_finished(rounds):
    pacer = pacing.CostProfiler(Adaptive(4))
    state = pacer.begin(LOOP, state_of(pacer.policy, [50, 50]))
    first = lambda: float(pacer.begin(LOOP, state_of(pacer.policy, [1])).draft_length.accepted[0])  # noqa: E731
    before = first()
    pace = dataclasses.replace(state.draft_length, accepted=jnp.float32([0.0, 3.0]))
    state = dataclasses.replace(state, draft_length=pace)
    state = pacer.advance(LOOP, state, 2, 1, rounds)
    assert first() == before
    pacer.record(LOOP, state, [0])  # as a stop string ends it, while the other goes on
    assert first() < before


def test_a_later_process_takes_the_costs_that_a_file_has_kept(rounds, tmp_path):
    file = tmp_path / "costs" / "models.json"
    pacer = pacing.CostProfiler(Adaptive(4), file)
    pacer.advance(LOOP, pacer.begin(LOOP, state_of(pacer.policy, [100])), 1, 1, rounds)
    later = pacing.CostProfiler(Adaptive(4), file)
    state = later.begin(LOOP, state_of(later.policy, [100]))
    np.testing.assert_allclose(state.draft_length.costs, list(COSTS.values()))
    del rounds.forced[:]
    later.advance(LOOP, state, 2, 1, rounds)
    assert rounds.forced == [-1] * 2
    # A process that began before them both keeps what it measures beside what they have kept.
    pacer.advance(OTHER, pacer.begin(OTHER, state_of(pacer.policy, [100])), 1, 1, rounds)
    assert json.loads(file.read_text())["costs"].keys() == {str(LOOP), str(OTHER)}
    assert [each.name for each in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1, 2]",
        '{"costs": 3}',
        '{"costs": {"loop": 3}}',
        '{"costs": {"loop": [1.0]}}',
        '{"costs": {"loop": [1.0, NaN, 1.0]}, "acceptances": []}',
        "\x00",
        '{"acceptances": {"greedy": [2.0, 0.0], "sampled": 3}}',
        '{"acceptances": {"greedy": [0.5], "sampled": ["a", 0.0, 9.0], "other": [0.5, 0.0, 9.0]}}',
        '{"acceptances": {"greedy": [0.5, NaN, 9.0], "sampled": [0.5, 1e9, 9.0]}}',
        '{"acceptances": {"greedy": [0.5, 1.0, 0.0], "sampled": [0.5, 1.0]}, "reading": -1.0}',
        '{"reading": Infinity}',
    ],
)
def test_a_damaged_file_of_costs_is_measured_again(rounds, tmp_path, text):
    file = tmp_path / "models.json"
    file.write_text(text)
    pacer = pacing.CostProfiler(Adaptive(4), file)
    assert pacer.costs == {}
    pacer.advance(LOOP, pacer.begin(LOOP, state_of(pacer.policy, [100])), 1, 1, rounds)
    nothing = [Adaptive.prior_rate, Adaptive.max_credit, PRIOR_ANSWER]
    assert json.loads(file.read_text()) == {
        "costs": {str(LOOP): list(COSTS.values())},
        "acceptances": {"greedy": nothing, "sampled": nothing},
        "reading": None,
    }


def test_a_later_process_knows_how_often_drafts_were_accepted_and_their_credit(
    rounds, tmp_path, monkeypatch
):
    # As several processes take it from the first.
    monkeypatch.setattr(pacing.distributed, "from_first", lambda act: json.loads(json.dumps(act())))
    file = tmp_path / "models.json"
    pacer = pacing.CostProfiler(Adaptive(4), file, share=0.5)
    state = pacer.advance(LOOP, pacer.begin(LOOP, state_of(pacer.policy, [50])), 2, 1, rounds)
    poor = dataclasses.replace(
        state.draft_length,
        accepted=jnp.float32([1.0]),
        judged=jnp.float32([20.0]),
        credit=jnp.float32([3.5]),
    )
    pacer.record_reading([request([1] * 201, SamplingParams())], 0, 6.0)
    pacer.record(LOOP, dataclasses.replace(state, draft_length=poor), [0])
    later = pacing.CostProfiler(Adaptive(4), file, share=0.5)
    begun = later.begin(LOOP, state_of(later.policy, [50])).draft_length
    tokens = FADE * Adaptive.prior_tokens
    expected = (Adaptive.prior_rate * tokens + 1) / (tokens + 20)
    np.testing.assert_allclose(begun.accepted / begun.judged, expected, rtol=1e-5)
    assert begun.credit.tolist() == [3.5]
    # It knows how long the answers were, here one that has ended early, and what reading takes.
    assert later.acceptances["greedy"].answer == pytest.approx(
        FADE * PRIOR_ANSWER + (1 - FADE) * float((state.lengths - state.prompt_lengths)[0])
    )
    assert later.reading.drafter_seconds(100) == pytest.approx(100 * 0.5 * 4.0 / 200)
    # Sampled requests, whose drafts are accepted less often, are kept apart.
    begun = later.begin(SAMPLED, state_of(later.policy, [50])).draft_length
    np.testing.assert_allclose(begun.accepted / begun.judged, Adaptive.prior_rate, rtol=1e-5)
    assert begun.credit.tolist() == [Adaptive.max_credit]


def test_acceptances_are_written_again_only_when_they_have_changed(rounds, tmp_path):
    file = tmp_path / "models.json"
    pacer = pacing.CostProfiler(Adaptive(4), file)
    state = pacer.begin(LOOP, state_of(pacer.policy, [50]))
    state = pacer.advance(LOOP, state, 1, 1, rounds)  # keeps the costs

    def record(**changes):
        changed = {name: jnp.float32([each]) for name, each in changes.items()}
        pace = dataclasses.replace(state.draft_length, **changed)
        file.unlink(missing_ok=True)
        pacer.record(LOOP, dataclasses.replace(state, draft_length=pace), [0])
        return file.exists()

    rate = {"accepted": 8 * Adaptive.prior_rate, "judged": 8.0}
    assert not record(**rate, credit=Adaptive.max_credit - 3)
    assert record(**rate, credit=Adaptive.max_credit - 5)
    assert not record(**rate, credit=Adaptive.max_credit - 3)
    assert record(accepted=0.0, judged=8.0)


def test_a_file_belongs_to_models_choices_and_machine(monkeypatch):
    models = tiny_model(0), tiny_model(1)
    file = pacing.costs_file(models, "token", 4)
    assert file == pacing.costs_file((tiny_model(2), tiny_model(3)), "token", 4)
    others = [
        pacing.costs_file((tiny_model(0, embed_size=64), tiny_model(1)), "token", 4),
        pacing.costs_file(models, "block", 4),
        # Nothing but what is static differs.
        pacing.costs_file((models[0], PromptLookup(4, 3)), "token", 4),
        pacing.costs_file((models[0], PromptLookup(4, 2)), "token", 4),
        pacing.costs_file((models[0], SuffixLookup(4)), "token", 4),
        pacing.costs_file((models[0], TokenRecycling(4)), "token", 4),
    ]
    monkeypatch.setattr(pacing.os, "cpu_count", lambda: 3)
    assert len({file, *others, pacing.costs_file(models, "token", 4)}) == 8


def test_costs_are_of_the_rows_that_run(monkeypatch):
    """A batch has room for eight; its rounds take as long as its running rows need."""
    engine = make_engine("prompt_lookup", TARGET, lookahead=4, policy=Adaptive(4))
    engine.reserve(200, 8)
    params = [SamplingParams(max_tokens=count) for count in (5, 9, 14, 21, 30)]
    requests = [request([1, 2, at], each) for at, each in enumerate(params)]
    profiler, seen = engine.cost_profiler, []
    shape = engine.plan(requests).of_rounds
    for running in (1, 2, 4, 8):
        costs = np.arange(1, 1 + len(profiler.policy.choices)) + running / 10
        profiler.costs[str(Load(shape, running))] = costs

    def advance(load, state, rounds, rows, advance):
        running = int((np.asarray(state.finish) == RUNNING).sum())
        seen.append((running, load.running, float(state.draft_length.costs[0])))
        return advance(state, 2, rows)

    monkeypatch.setattr(profiler, "advance", advance)
    batch = engine.open(requests, 8)
    batch.insert(dict(enumerate(requests)))
    finish(batch)
    assert {load for _, load, _ in seen} == {1, 2, 4, 8}
    for running, load, cost in seen:
        assert load // 2 < running <= load
        assert cost == pytest.approx(1 + load / 10)
