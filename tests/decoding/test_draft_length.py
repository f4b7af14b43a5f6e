"""Lookahead policies, each by itself: what they allow after what they saw."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.config import SamplingParams
from spec_jax.decoding.adaptive import Adaptive
from spec_jax.decoding.draft_length import (
    Confidence,
    Constant,
    DraftOutcome,
    Heuristic,
    Oracle,
    halvings,
    scoring_widths,
)
from spec_jax.drafters.base import Draft
from spec_jax.drafters.draft_model import CATCH_UP
from spec_jax.testing import ReferenceDecoder
from tests.harness import DRAFT, TARGET, completions, finish, make_engine, request
from tests.often import often

REFERENCE = ReferenceDecoder(TARGET)


def outcome(drafted, accepted, confidence=None):
    if confidence is not None:
        confidence = jnp.asarray(confidence, jnp.float32)
    return DraftOutcome(
        jnp.asarray(drafted, jnp.int32), jnp.asarray(accepted, jnp.int32), confidence
    )


def test_widths_are_the_halvings_of_k_where_drafts_differ_in_length():
    assert [halvings(n) for n in (0, 1, 2, 3, 8, 20)] == [
        (0,),
        (0, 1),
        (0, 1, 2),
        (0, 1, 3),
        (0, 1, 2, 4, 8),
        (0, 1, 2, 5, 10, 20),
    ]
    for policy in (Constant(4), Oracle(4)):
        assert scoring_widths(policy, fixed_length=True) == (4,)
        assert scoring_widths(policy, fixed_length=False) == (0, 4)
    assert scoring_widths(Constant(0), fixed_length=False) == (0,)
    for policy in (Constant(4), Heuristic(4), Adaptive(4)):
        assert scoring_widths(policy, fixed_length=False, consistent=True) == (4,)
    for policy in (Heuristic(4), Confidence(4)):
        assert scoring_widths(policy, fixed_length=True) == (0, 1, 2, 4)
    widths = {1: (0, 1), 2: (0, 2), 3: (0, 3), 8: (0, 2, 4, 8)}
    assert {n: scoring_widths(Adaptive(n), fixed_length=True) for n in widths} == widths


@pytest.mark.parametrize("policy", [Constant(4), Oracle(4)])
def test_a_constant_policy_is_the_same_for_all(policy):
    state = policy.update(policy.init(3), outcome([4, 4, 2], [4, 0, 1]))
    assert policy.limits(state, rows(3)).tolist() == [4, 4, 4]
    assert policy.threshold(state, 3) is None
    assert (policy.varies, policy.counts_rejected) == (False, policy == Constant(4))


def test_the_heuristic_drafts_two_more_after_a_whole_draft_and_else_one_less():
    policy = Heuristic(8)
    state = policy.init(5)
    assert policy.limits(state, rows(5)).tolist() == [5] * 5
    state = policy.update(state, outcome([5, 5, 5, 5, 0], [5, 4, 0, 5, 0]))
    # A round without a draft says nothing about drafts.
    assert policy.limits(state, rows(5)).tolist() == [7, 4, 4, 7, 5]
    state = policy.update(state, outcome([7, 4, 4, 3, 0], [7, 4, 3, 3, 0]))
    assert policy.limits(state, rows(5)).tolist() == [8, 6, 3, 8, 5]  # at most eight
    for _ in range(5):
        state = policy.update(state, outcome([1] * 5, [0] * 5))
    assert policy.limits(state, rows(5)).tolist() == [3, 1, 1, 3, 1]  # at least one
    assert Heuristic(3).init(2).tolist() == [3, 3]
    assert Heuristic(8, start=2).init(1).tolist() == [2]


def test_a_row_knows_the_confidence_of_the_draft_that_was_chosen():
    tokens = jnp.zeros((2, 6), jnp.int32)
    confidence = jnp.arange(12, dtype=jnp.float32).reshape(2, 6) / 12
    draft = Draft(tokens, None, jnp.full((2,), 2, jnp.int32), num_drafts=3, confidence=confidence)
    seen = DraftOutcome.of(
        draft, draft.path(jnp.int32([2, 0])), jnp.int32([2, 2]), jnp.int32([1, 2])
    )
    np.testing.assert_allclose(seen.confidence, np.array([[2, 5], [6, 9]]) / 12, rtol=1e-6)
    plain = dataclasses.replace(draft, confidence=None)
    assert DraftOutcome.of(plain, seen.drafted, seen.drafted, seen.accepted).confidence is None


def expected_threshold(judged, start, bins=50):
    """Plain Python: the bin edge of the least fpr + 3 fnr, once there is enough to judge by."""
    accepted = [int(confidence * bins) for confidence, kept in judged if kept]
    rejected = [int(confidence * bins) for confidence, kept in judged if not kept]
    if not accepted or not rejected or len(judged) <= 5:
        return start
    costs = []
    for cut in range(bins):
        false_runs = sum(each >= cut for each in rejected) / len(rejected)
        false_stops = sum(each < cut for each in accepted) / len(accepted)
        costs.append(false_runs + 3 * false_stops)
    return int(np.argmin(np.round(costs, 6))) / bins


def test_the_threshold_is_retuned_by_what_each_row_saw():
    rng, rows, width = np.random.default_rng(0), 6, 4
    policy = Confidence(width, start=0.4, retune=True)
    state, judged = policy.init(rows), [[] for _ in range(rows)]
    update = jax.jit(lambda *args: policy.update(args[0], DraftOutcome(*args[1:])))
    moved = 0
    for _ in range(12):
        np.testing.assert_allclose(
            policy.threshold(state, rows), [expected_threshold(each, 0.4) for each in judged]
        )
        # The first row accepts all, so it never has anything to weigh; the second drafts nothing.
        confidence = (rng.integers(0, 50, (rows, width)) + 0.5) / 50
        drafted = rng.integers(0, width + 1, rows)
        accepted = np.minimum(drafted, rng.integers(0, width + 1, rows))
        accepted[0], drafted[1], accepted[1] = drafted[0], 0, 0
        state = update(
            state,
            *(jnp.asarray(each, jnp.int32) for each in (drafted, accepted)),
            jnp.asarray(confidence, jnp.float32),
        )
        for row in range(rows):
            n = accepted[row]
            judged[row] += [(confidence[row, i], True) for i in range(n)]
            # The first rejected token was judged; those after it were not.
            judged[row] += [(confidence[row, n], False)] if n < drafted[row] else []
        moved += len(set(np.asarray(policy.threshold(state, rows)).tolist())) > 2
    assert policy.threshold(state, rows)[:2].tolist() == [np.float32(0.4)] * 2
    assert moved > 3


def test_the_threshold_stays_where_it_was_put_without_retuning():
    policy = Confidence(4, start=0.7)
    state = policy.update(policy.init(2), outcome([4, 4], [0, 4], np.full((2, 4), 0.9)))
    assert state is None
    assert policy.threshold(state, 2).tolist() == [np.float32(0.7)] * 2
    assert policy.limits(state, rows(2)).tolist() == [4, 4]


def rows(count):
    return jnp.ones((count,), bool)


def paced(policy, rows, *, costs=None, rate=None):
    state = policy.init(rows)
    if costs is not None:
        state = dataclasses.replace(state, costs=jnp.asarray(costs, jnp.float32))
    if rate is not None:
        judged = jnp.full((rows,), 1e6, jnp.float32)
        accepted = judged * jnp.asarray(rate, jnp.float32)
        state = dataclasses.replace(state, accepted=accepted, judged=judged)
    return state


COSTS = ([1, 1.1, 1.2, 1.4, 1.8], [1, 1.5, 2, 3, 5], [1, 2, 3, 5, 9], [1] * 5)


def test_adaptive_takes_the_k_with_which_all_rows_emit_most_per_second():
    policy, taken = Adaptive(8), set()
    rates = [0.0, 0.2, 0.5, 0.7, 0.9, 0.99]
    batches = [*([each] for each in rates), *map(list, itertools.combinations(rates, 3))]
    for costs, batch in itertools.product(COSTS, batches):
        state = paced(policy, len(batch) + 1, costs=costs, rate=[*batch, 0.6])
        running = rows(len(batch) + 1).at[-1].set(False)  # the last slot is free
        emitted = [sum(sum(a**i for i in range(k + 1)) for a in batch) for k in policy.choices]
        rate = [tokens / cost for tokens, cost in zip(emitted, costs, strict=True)]
        best = policy.choices[int(np.argmax(np.round(rate, 5)))]
        assert policy.limits(state, running).tolist() == [best] * (len(batch) + 1), (costs, batch)
        taken.add(best)
    assert taken >= {0, 2, 8}


@pytest.mark.parametrize("costs", COSTS[:2])
def test_a_confident_draft_goes_on_as_long_as_another_token_pays(costs):
    policy, rates = Adaptive(8), [0.9, 0.7, 0.8]
    state = paced(policy, 4, costs=costs, rate=[*rates, 0.99])
    running = rows(4).at[-1].set(False)
    limits, least = policy.confident_limits(state, running)
    emitted = [sum(sum(a**i for i in range(k + 1)) for a in rates) for k in policy.choices]
    best = max(tokens / cost for tokens, cost in zip(emitted, costs, strict=True))
    for row, rate in enumerate(rates):
        # Seven more tokens, from one to eight, of three rows cost the difference.
        a_token = (costs[4] - costs[1]) / 7 / 3
        expected = min(a_token * best / rate, policy.max_survival)
        assert limits[row] == 8
        np.testing.assert_allclose(least[row], expected, rtol=1e-5)


def test_a_confident_draft_obeys_what_does_not_pay_and_what_is_measured():
    policy = Adaptive(8)
    poor = paced(policy, 2, costs=[1, 1.5, 2, 3, 5], rate=[0.2, 0.1])
    limits, least = policy.confident_limits(poor, rows(2))
    assert limits.tolist() == policy.limits(poor, rows(2)).tolist() and max(limits) <= 1
    assert least.tolist() == [0, 0]
    forced = dataclasses.replace(paced(policy, 2, rate=[0.99, 0.99]), forced=jnp.int32(4))
    limits, least = policy.confident_limits(forced, rows(2))
    assert (limits.tolist(), least.tolist()) == ([4, 4], [0, 0])
    assert Constant(4).confident_limits(None, rows(2)) is None


def test_adaptive_does_what_it_is_forced_to_while_costs_are_measured():
    policy = Adaptive(8)
    state = paced(policy, 2, rate=[0.99, 0.99])
    assert policy.limits(state, rows(2)).tolist() == [8, 8]
    for forced in (0, 4):
        one = dataclasses.replace(state, forced=jnp.int32(forced))
        assert policy.limits(one, rows(2)).tolist() == [forced] * 2


def test_adaptive_gives_up_loses_a_hundredth_of_the_time_and_comes_back():
    policy, costs = Adaptive(4), {0: 1, 1: 1.4, 2: 1.4, 4: 1.8}  # one is scored like two
    state = paced(policy, 1, costs=[1, 1.4, 1.4, 1.8])

    @jax.jit
    def one_round(state, share):
        drafted = policy.limits(state, rows(1))
        accepted = drafted * share
        return drafted[0], policy.update(state, DraftOutcome(drafted, accepted, None))

    def rounds(state, share, count):
        drafted = []
        for _ in range(count):
            n, state = one_round(state, jnp.int32(share))
            drafted.append(int(n))
        return drafted, state

    drafted, state = rounds(state, 0, 1200)
    given_up = drafted.index(0)
    assert max(drafted[:given_up]) > 1 and given_up < 15
    later = drafted[given_up:]
    assert set(later) == {0, 1}
    lost = sum(costs[n] - 1 for n in later)
    assert 0.005 * len(later) < lost < policy.max_lost * len(later) + 0.4
    # Once tries are accepted again and again, the row drafts as it did.
    drafted, state = rounds(state, 1, 200)
    assert drafted[-1] == 4
    # A text whose drafts paid does not make the next one try more often.
    drafted, _ = rounds(state, 0, 1200)
    assert sum(costs[n] - 1 for n in drafted[drafted.index(0) :]) < policy.max_lost * 1200 + 0.4


def test_adaptive_loses_little_where_the_rate_promises_too_much():
    """A rate of many earlier tokens, none of which tells of these."""
    policy, cost = Adaptive(4), {0: 1.0, 1: 1.4, 2: 1.4, 4: 1.8}
    state = paced(policy, 1, costs=[1, 1.4, 1.4, 1.8], rate=[0.9])

    @jax.jit
    def one_round(state):
        drafted = policy.limits(state, rows(1))
        return drafted[0], policy.update(state, DraftOutcome(drafted, 0 * drafted, None))

    spent = 0.0
    for _ in range(600):
        drafted, state = one_round(state)
        spent += cost[int(drafted)]
    assert 603 < spent < 1.03 * 600 + 5 + policy.max_credit


def test_what_drafts_have_gained_pays_for_a_text_that_begins_badly():
    """Without credit the text would draft no more after its first two drafts."""
    policy = Adaptive(8)
    state = paced(policy, 1, costs=[1, 1.5, 2, 3, 5], rate=[0.92])
    poor = dataclasses.replace(state, credit=jnp.zeros((1,)))
    for _ in range(2):
        state, poor = (policy.update(each, outcome([4], [0])) for each in (state, poor))
    assert policy.limits(state, rows(1)).tolist() != [0] == policy.limits(poor, rows(1)).tolist()
    # What is gained later counts up to the credit again.
    for _ in range(20):
        state = policy.update(state, outcome([4], [4]))
    assert state.credit.tolist() == [policy.max_credit]


def test_measuring_counts_as_no_loss():
    policy = Adaptive(4)
    state = dataclasses.replace(paced(policy, 1, rate=[0.0]), forced=jnp.int32(4))
    for _ in range(3):
        state = policy.update(state, outcome([4], [0]))
    assert state.lost.tolist() == state.spent.tolist() == [0.0]
    assert state.credit.tolist() == [policy.max_credit]


# ------------------------------------------------------------------ in the loop, on tiny models


@pytest.fixture(scope="module")
def stopping_engine():
    """The drafter is never as sure as this."""
    return make_engine("other", TARGET, DRAFT, lookahead=3, policy=Confidence(3, start=0.9999))


@pytest.mark.parametrize("temperature", often([0.0, 1.0], [1.0]))
def test_a_token_of_low_confidence_is_the_last_one_drafted_and_is_kept(
    stopping_engine, temperature
):
    params = SamplingParams(max_tokens=40, temperature=temperature)
    batch = finish(stopping_engine.start([request([1, 2, 3], params)]))
    counters = batch.state.counters
    rounds, drafted, accepted = (
        int(each[0]) for each in (counters.rounds, counters.drafted, counters.accepted)
    )
    # One token in each round, but none in a last round that can emit one only.
    assert drafted in (rounds, rounds - 1)
    assert 0 < accepted < drafted and rounds + accepted == 40


def test_the_oracle_counts_what_was_accepted_and_nothing_else():
    engine = make_engine("other", TARGET, DRAFT, lookahead=3, policy=Oracle(3))
    counters = finish(engine.start([request([1, 2, 3])])).state.counters
    assert counters.drafted.tolist() == counters.accepted.tolist() != [0]
    assert int(counters.rounds[0] + counters.accepted[0]) == 40


@pytest.fixture(scope="module")
def forced_engine():
    engine = make_engine("self", TARGET, lookahead=3, policy=Adaptive(3))
    engine.cost_profiler = None  # the tests force K themselves
    return engine


def force(batch, lookahead):
    pace = batch.state.draft_length
    pace = dataclasses.replace(pace, forced=jnp.int32(lookahead))
    batch.state = dataclasses.replace(batch.state, draft_length=pace)


@pytest.mark.parametrize("temperature", often([0.0, 1.0], [1.0]))
def test_a_draft_model_that_idled_reads_what_it_has_missed(forced_engine, temperature):
    """With the target's own weights all drafts are accepted, unless the cache has a hole."""
    params = SamplingParams(max_tokens=80, temperature=temperature)
    prompts = [[3], [1, 2, 3, 4, 5, 1, 2]]
    requests = [request(prompt, params, seed=i) for i, prompt in enumerate(prompts)]
    batch = forced_engine.start(requests)
    for lookahead, rounds in [(3, 2), (0, 2 * CATCH_UP + 3), (3, 2), (0, 1), (1, 3), (0, 5)]:
        force(batch, lookahead)
        before = batch.state.counters
        before = (before.rounds + 0, before.drafted + 0)
        batch.advance(rounds)
        after = batch.state.counters
        assert (after.rounds - before[0])[:2].tolist() == [rounds] * 2
        assert (after.drafted - before[1])[:2].tolist() == [rounds * lookahead] * 2
        assert after.accepted.tolist() == after.drafted.tolist()
    force(batch, 3)
    finish(batch)
    assert batch.state.counters.accepted.tolist() == batch.state.counters.drafted.tolist()
    if temperature == 0:
        assert completions(batch, requests) == [REFERENCE.greedy(p, params)[0] for p in prompts]


def test_a_row_near_its_end_does_not_draft_past_it(forced_engine):
    sizes = [1, 2, 3, 40]
    requests = [request([3, i], SamplingParams(max_tokens=size)) for i, size in enumerate(sizes)]
    batch = forced_engine.start(requests)
    force(batch, 3)
    counters = finish(batch).state.counters
    # Each round emits its drafted tokens and one more.
    assert (counters.drafted + counters.rounds).tolist() == sizes
    assert counters.rounds.tolist() == [1, 1, 1, 10]


@pytest.mark.parametrize("temperature", often([0.0, 1.0], [1.0]))
@pytest.mark.parametrize(
    "method", often(["other", "early_exit", "universal_vocabulary"], ["early_exit"])
)
def test_a_drafter_says_how_confident_it_was_and_the_threshold_follows(method, temperature):
    policy = Confidence(4, start=0.01, retune=True)  # no bin's edge, so that a change shows
    engine = make_engine(method, TARGET, DRAFT, policy=policy)
    params = SamplingParams(max_tokens=40, temperature=temperature)
    batch = finish(engine.start([request([1, 2, 3], params)]))
    seen = batch.state.draft_length
    # A greedy row's q is certain of its token; the drafter is not.
    assert (seen.accepted + seen.rejected)[:, :-1].sum() > 0
    assert int(seen.accepted.sum()) == int(batch.state.counters.accepted.sum())
    assert seen.rejected.sum() > 0
    assert policy.threshold(seen, 1)[0] != policy.threshold(policy.init(1), 1)[0]
