"""Intervals of paired differences, against SciPy's own and by simulation."""

import numpy as np
import pytest
from scipy import stats

from spec_jax.evaluation.parity import (
    DIFFERENT,
    NO_DIFFERENCE,
    NOT_TESTED,
    Estimate,
    Scale,
    compare,
    estimate,
)

PASS, ERRORS = Scale("pass@1"), Scale("WER", 1.0, higher_is_better=False, bounded=False)
LIKELIHOOD = Scale("log-likelihood", None, bounded=False)


def answers(random, chance, samples=4):
    """Right or wrong answers to items, each with another chance."""
    return (random.random((len(chance), samples)) < chance[:, None]).astype(np.float64)


def test_an_interval_of_equal_weights_is_scipys():
    scores = np.random.default_rng(0).normal(0.3, 1, 17)
    found, theirs = estimate(scores), stats.ttest_1samp(scores, 0).confidence_interval(0.95)
    np.testing.assert_allclose([found.mean, found.low, found.high], [scores.mean(), *theirs])
    equal = estimate(scores, np.full(17, 3.0))
    np.testing.assert_allclose([equal.low, equal.high], [found.low, found.high], rtol=1e-12)


def test_a_weighted_interval_by_hand():
    """Errors 1, 0 and 3 of 2, 4 and 4 words: 4 of 10, and residuals 0.2, -1.6 and 1.4."""
    found = estimate(np.array([0.5, 0.0, 0.75]), np.array([2.0, 4.0, 4.0]))
    error = np.sqrt(3 / 2 * (0.2**2 + 1.6**2 + 1.4**2)) / 10
    half = 4.30265272974946 * error
    np.testing.assert_allclose(
        [found.mean, found.low, found.high], [0.4, 0.4 - half, 0.4 + half], rtol=1e-12
    )


def test_a_weighted_interval_holds_the_ratio_in_19_of_20_runs():
    random, held = np.random.default_rng(1), 0
    for _ in range(1000):
        words = random.integers(5, 40, 50).astype(np.float64)
        errors = random.binomial(words.astype(int), 0.2)
        found = estimate(errors / words, words)
        held += found.low <= 0.2 <= found.high
    assert 920 <= held <= 975


def test_samples_of_one_item_are_no_items():
    """More answers that say the same make no interval narrower."""
    random = np.random.default_rng(2)
    plain, method = random.random((20, 1)), random.random((20, 1))
    once = compare(PASS, plain, method).difference
    often = compare(PASS, np.repeat(plain, 9, 1), np.repeat(method, 9, 1)).difference
    np.testing.assert_allclose([often.low, often.high], [once.low, once.high], rtol=1e-12)


def test_equal_arms_are_called_different_in_one_run_of_twenty():
    random, different = np.random.default_rng(3), 0
    for _ in range(1000):
        chance = random.beta(0.5, 0.5, 60)
        found = compare(PASS, answers(random, chance), answers(random, chance))
        different += found.verdict == DIFFERENT
    assert 30 <= different <= 75


def test_a_worse_arm_is_different():
    random = np.random.default_rng(4)
    chance = random.beta(2, 2, 164)
    plain, worse = answers(random, chance), answers(random, chance * 0.8)
    found = compare(PASS, plain, worse)
    assert found.verdict == DIFFERENT and found.difference.high < 0
    assert compare(PASS, worse, plain).difference.low > 0
    more_errors = compare(ERRORS, 1 - plain, 1 - worse, random.integers(1, 9, 164).astype(float))
    assert more_errors.verdict == DIFFERENT and more_errors.difference.low > 0


def test_a_shift_that_is_always_there_is_different():
    scores = np.random.default_rng(5).normal(size=(30, 1))
    assert compare(LIKELIHOOD, scores, scores - 0.25).verdict == DIFFERENT


def test_equal_scores_are_no_difference_and_no_proof():
    scores = np.array([[1.0], [0.0], [0.0], [1.0], [0.0]])
    found = compare(PASS, scores, scores)
    assert (found.verdict, found.difference) == (NO_DIFFERENCE, Estimate(0.0, 0.0, 0.0))
    # With this share of items that differ, five items show none in 1 of 20 runs.
    assert (1 - found.detectable) ** 5 == pytest.approx(0.05)
    assert compare(LIKELIHOOD, scores - 3, scores - 3).detectable is None
    one = scores.copy()
    one[1] = 1.0
    found = compare(PASS, scores, one)
    assert found.plain.low == 0.0 < found.plain.high == pytest.approx(1.0, abs=0.1)
    assert found.verdict == NO_DIFFERENCE
    assert found.detectable == pytest.approx((found.difference.high - found.difference.low) / 2)


@pytest.mark.parametrize(
    ("scale", "worst", "better"),
    [(PASS, 0.0, 1.0), (ERRORS, 1.0, 0.5), (ERRORS, 2.5, 0.0)],
)
def test_a_model_too_weak_tests_nothing(scale, worst, better):
    zeros = np.full((6, 2), worst)
    found = compare(scale, zeros, zeros)
    assert found.verdict == NOT_TESTED and "no answer of either scored" in found.reason
    some = zeros.copy()
    some[3, 1] = better
    assert compare(scale, zeros, some).verdict == NO_DIFFERENCE


def test_a_likelihood_of_zero_is_a_score_like_another():
    zeros = np.zeros((6, 1))
    assert compare(LIKELIHOOD, zeros, zeros).verdict == NO_DIFFERENCE


def test_what_was_known_before_to_be_no_test():
    found = compare(PASS, np.ones((3, 1)), np.ones((3, 1)), reason="nothing was drafted")
    assert (found.verdict, found.reason) == (NOT_TESTED, "nothing was drafted")
    assert found.as_dict()["not_tested_because"] == "nothing was drafted"
