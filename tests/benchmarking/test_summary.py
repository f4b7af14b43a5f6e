"""Figures of results whose values are known."""

import numpy as np
import pytest

from spec_jax.benchmarking.comparison import FASTER, SLOWER, UNDECIDED, compare
from spec_jax.benchmarking.doubts import doubts
from spec_jax.benchmarking.results import Results
from spec_jax.benchmarking.summary import (
    best_of_families,
    categories,
    projected_speedups,
    summarize,
)
from tests.benchmarking.handmade import (
    PLAIN,
    SYSTEMS,
    costs,
    drafting,
    header,
    request,
    results,
    run,
)


def only(found: Results, name: str):
    (measured,) = summarize(found).values()
    return next(each for each in measured if each.system.name == name)


def test_speed_is_the_mean_of_requests_over_that_of_the_baseline():
    found = Results(header(), [run(PLAIN, 0, 8.0, 4.0), run(drafting(1), 0, 4.0, 2.0, kept=1)])
    plain, own = only(found, "plain"), only(found, "draft_model, K = 1")
    assert plain.tokens_per_second == (1.5, 1.5, 1.5)  # of 1 and 2, not 16 tokens in 12 seconds
    assert own.speedup == (2.0, 2.0, 2.0) and plain.speedup == (1.0, 1.0, 1.0)
    assert own.seconds_per_token.median == 6 / 16
    assert (own.tokens_per_call, own.acceptance_rate) == (2.0, 1.0)


def test_a_speed_up_pairs_the_repeats():
    measured = next(iter(summarize(results()).values()))
    own = next(each for each in measured if each.system == drafting(1))
    assert own.tokens_per_second == pytest.approx((1.125, 0.75, 1.5))
    assert own.speedup == pytest.approx((2.0, 2.0, 2.0))  # both were slower in the second


def test_the_baseline_is_the_fastest_plain_decoding():
    theirs = SYSTEMS[3]
    found = Results(header(), [run(PLAIN, 0, 8.0), run(theirs, 0, 4.0), run(drafting(1), 0, 2.0)])
    own = only(found, "draft_model, K = 1")
    assert own.speedup is not None and own.speedup.median == 2.0
    assert own.baseline is not None and own.baseline.system == theirs
    assert own.plain is not None and own.plain.system == PLAIN


def test_positions_and_percentiles():
    found = Results(header(), [run(drafting(3), 0, 8.0, 4.0, kept=1)])
    own = only(found, "draft_model, K = 3")
    assert own.acceptance_per_position == [1.0, 0.0, 0.0]
    assert own.acceptance_rate == pytest.approx(1 / 3)
    assert own.speedup is None and own.baseline is None
    assert own.first_token_seconds == pytest.approx([0.75, 0.95, 0.995])
    # What follows the first token of 8: 7 / 8 of the time, by 7.
    assert own.seconds_per_output_token == pytest.approx([0.75, 0.95, 0.995])


def test_the_cost_of_calls_predicts_the_speed_up():
    measured = next(iter(summarize(results()).values()))
    one = next(each for each in measured if each.system == drafting(1))
    three = next(each for each in measured if each.system == drafting(3))
    assert one.predicted_speedup == pytest.approx(2 / (0.25 + 1.5))
    assert three.predicted_speedup == pytest.approx(2 / (3 * 0.25 + 2.0))
    assert one.loop_efficiency == pytest.approx((1.75, 1.75, 1.75))
    assert three.round_seconds == pytest.approx((0.75, 2.0, 2.8125 - 2.75))
    assert three.loop_efficiency is not None
    assert three.loop_efficiency.median == pytest.approx((8 / 5) / (2 / 2.75))


def doubts_of(costs_of, *seconds: float, kept: int = 1) -> list[str]:
    """Of drafting one token a round in some repeats, each prompt in the given seconds."""
    lines = [costs_of]
    for repeat, each in enumerate(seconds):
        lines += [run(PLAIN, repeat, 8.0, 8.0), run(drafting(1), repeat, each, each, kept=kept)]
    return list(doubts(only(Results(header(), lines), "draft_model, K = 1")))


def test_figures_that_contradict_themselves_are_doubted():
    # A round is predicted to take 1.75 s, and eight tokens four rounds.
    assert doubts_of(costs(), 7.2, 7.3) == []
    assert doubts_of(costs(), 7.2, 9.5) == ["tokens a second of the repeats differ by 28%"]
    fast = doubts_of(costs(), 6.0, 6.0)
    assert "1.17 times as fast as the cost of its calls allows" in fast[0]
    assert fast[1] == "a round takes 250.00 ms less than its calls"
    streaming = costs().model_copy(update={"streaming": 3.5e9})
    assert doubts_of(streaming, 7.2) == ["weights are read at 1.14 of the speed of streaming"]


def test_an_oracle_pays_for_what_is_kept_alone():
    measured = next(iter(summarize(results()).values()))
    three = next(each for each in measured if each.system == drafting(3))
    found = projected_speedups(three)  # each round keeps one token of three
    assert found is not None
    assert found.same == pytest.approx([1, 2 / 1.75, 2 / (0.5 + 1.75), 2 / 2.75])
    assert found.same[3] == pytest.approx(three.predicted_speedup)
    assert found.oracle == pytest.approx([1, 2 / 1.75, 2 / 1.75, 2 / 1.75])


def test_an_oracle_of_rounds_that_differ():
    """Against a loop over rounds, each of which accepts another length."""
    lengths = np.random.default_rng(0).integers(0, 4, 100)
    kept = tuple(int((lengths > i).sum()) for i in range(3))
    made = results()
    changed = {"rounds": 100, "tokens": int(100 + lengths.sum()), "accepted_per_position": kept}
    lines = [costs(), run(PLAIN, 0, 8.0), run(drafting(3), 0, 4.0)]
    lines[2] = lines[2].model_copy(update={"requests": (request(0, 4.0, 3, 1, **changed),)})
    three = next(iter(summarize(Results(made.header, lines)).values()))[1]
    found = projected_speedups(three)
    v = {1: 1.0, 2: 1.5, 3: 1.75, 4: 2.0}
    for k in range(4):
        drafts = [min(int(n), k) for n in lengths]
        seconds = sum(0.25 * n + v[n + 1] for n in drafts)
        assert found.oracle[k] == pytest.approx(sum(1 + n for n in drafts) / seconds)


def test_batches_count_all_rows_together():
    cells = summarize(results())
    batch = next(each for cell, each in cells.items() if cell.batch_size == 4)
    assert batch[0].tokens_per_second.high == pytest.approx(16 / (24 / 4))


def test_categories_and_families():
    measured = next(iter(summarize(results()).values()))
    assert categories(measured) == ["a", "b"]
    assert [each.system.name for each in best_of_families(measured)] == [
        "plain",
        "draft_model, K = 1",
    ]
    own = measured[1].of_category("b")
    assert own.tokens_per_second.high == 1.0 and own.speedup is not None
    assert own.speedup.median == 2.0


def test_a_comparison_finds_what_is_faster():
    verdicts = {each.system: each for each in compare(results(), results(scale=0.5))}
    assert verdicts["plain"].verdict == UNDECIDED and verdicts["plain"].ratio == 1.0
    assert verdicts["plain"].low < 1 < verdicts["plain"].high
    # Repeats differ by a factor of two, and so does the change: it may be the machine.
    assert verdicts["draft_model, K = 1"].ratio == pytest.approx(2.0)
    much = {each.system: each.verdict for each in compare(results(), results(scale=0.2))}
    assert much["draft_model, K = 1"] == FASTER
    assert {each.verdict for each in compare(results(scale=0.2), results())} == {UNDECIDED, SLOWER}


def test_a_comparison_needs_the_same_prompts():
    other = results()
    digest = other.header.prompts[0].model_copy(update={"digest": "other"})
    other.header = other.header.model_copy(update={"prompts": (digest,)})
    assert compare(results(), other) == []


def test_a_request_without_time_has_no_speed():
    assert request(0, 0.0).tokens_per_second == 0.0
