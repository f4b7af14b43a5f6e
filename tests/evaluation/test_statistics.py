"""The audit's statistics: right error rates, the promised power, exact expectations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from spec_jax.evaluation import statistics
from spec_jax.evaluation.statistics import (
    Tally,
    by_pair,
    by_quantile,
    by_rarity,
    by_ratio,
    by_token,
    holm,
    quantiles,
)
from spec_jax.sampling.draw import draw
from tests.often import often

VOCAB = 12


def contexts(random, count, vocab=VOCAB):
    """Distributions as different contexts have them, some of them nearly certain."""
    p = random.dirichlet(np.full(vocab, 0.5), count)
    p[: count // 4] = 0.999 * np.eye(vocab)[3] + 0.001 * p[: count // 4]
    return p


def drawn(random, p):
    return (random.random((len(p), 1)) > p.cumsum(1)).sum(1).clip(0, p.shape[1] - 1)


def p_value(bins, expected):
    tally = Tally(expected.shape[1])
    tally.add(bins, expected)
    test = tally.test("")
    return None if test is None else test.p_value


BINNINGS = {
    "token": lambda p, q, tokens, random: by_token(p, tokens),
    "rank": lambda p, q, tokens, random: by_token(np.pad(p, ((0, 0), (0, 100))), tokens),
    "rarity": lambda p, q, tokens, random: by_rarity(p, tokens),
    "ratio": lambda p, q, tokens, random: by_ratio(p, q, tokens),
    "quantile": lambda p, q, tokens, random: by_quantile(quantiles(p, tokens, random)),
    "pair": lambda p, q, tokens, random: by_pair(
        np.roll(quantiles(p, tokens, random), 1), quantiles(p, tokens, random)
    ),
}


@pytest.mark.parametrize("binning", often(BINNINGS, [*BINNINGS][::2]))
def test_p_values_are_uniform_when_tokens_follow_their_distributions(binning):
    random = np.random.default_rng(0)
    found = []
    for _ in range(1000):
        p, q = contexts(random, 1000), contexts(random, 1000)
        found.append(p_value(*BINNINGS[binning](p, q, drawn(random, p), random)))
    assert stats.kstest(found, "uniform").pvalue > 1e-4
    # In the tail as well, where corrected tests decide: 10 are expected.
    assert (np.array(found) < 0.01).sum() <= 25


def test_for_one_context_it_is_pearsons_test():
    random = np.random.default_rng(0)
    p = np.repeat(random.dirichlet(np.full(VOCAB, 5.0), 1), 2000, axis=0)
    tokens = drawn(random, p)
    counts = np.bincount(tokens, minlength=VOCAB)
    expected = stats.chisquare(counts, p[0] * len(p)).pvalue
    assert p_value(*by_token(p, tokens)) == pytest.approx(expected)


def test_a_rare_event_alone_rejects_nothing():
    p = np.tile([0.5, 0.5 - 1e-7, 1e-7], (1000, 1))
    tokens = np.array([0, 1] * 499 + [2, 2])
    assert p_value(*by_token(p, tokens)) > 0.1
    assert p_value(*by_token(p[:, [0, 2]] * [[2, 1]], np.zeros(1000, int))) is None


def test_the_stated_power_is_the_power():
    random = np.random.default_rng(0)
    count, alpha, found = 2000, 1e-3, 0
    right = np.full(10, 0.1)
    test = statistics.Test("", count, 9, 0.5)
    w = test.detectable(alpha)
    wrong = right * (1 + w * np.where(np.arange(10) % 2, 1, -1))
    for _ in range(500):
        tokens = random.choice(10, count, p=wrong)
        found += p_value(*by_token(np.tile(right, (count, 1)), tokens)) < alpha
    assert 0.85 < found / 500 < 0.95


def test_expectations_are_probabilities_of_the_bins():
    random = np.random.default_rng(0)
    p, q = contexts(random, 40), contexts(random, 40)
    for name, binning in BINNINGS.items():
        bins, expected = binning(p, q, drawn(random, p), random)
        np.testing.assert_allclose(expected.sum(1), 1, err_msg=name)
        assert (expected[np.arange(40), bins] > 0).all(), name
    large = random.dirichlet(np.full(200, 0.3), 3)
    for token in range(200):
        bins, expected = by_token(large, np.full(3, token))
        order = np.argsort(-large, axis=1)
        rank = [int(np.flatnonzero(row == token)[0]) for row in order]
        assert bins.tolist() == [int(np.log2(each + 1)) for each in rank]
    np.testing.assert_allclose(expected[:, 1], -np.sort(-large)[:, 1:3].sum(1))


def in_tail(way, count):
    """The p-value of draws from a tail of tokens of 5e-8 each."""
    vocab = 131_072
    p = np.full(vocab, 0.00655 / (vocab - 1))
    p[0] = 1 - p[1:].sum()
    rows = jnp.broadcast_to(jnp.asarray(p, jnp.float32), (16, vocab))
    # The hardware's generator: these are many random numbers for the old way.
    keys = jax.random.split(jax.random.key(0, impl="rbg"), (count // 16, 16))
    tokens = np.asarray(jax.jit(lambda keys: jax.lax.map(lambda k: way(k, rows), keys))(keys))
    tally = Tally(statistics.RARITY_BINS)
    labels, expected = by_rarity(np.tile(p, (2, 1)), np.array([0, 1]))
    tally.add(labels[np.minimum(tokens.ravel(), 1)], np.tile(expected[:1], (count, 1)))
    test = tally.test("rare and common tokens")
    assert test is not None
    return test.p_value


def low_mode(keys, probs):
    """The draw of other libraries, whose noise has a grain of 2^-23."""
    noise = jax.vmap(lambda key: jax.random.gumbel(key, probs.shape[1:], mode="low"))(keys)
    return jnp.argmax(jnp.log(probs) + noise, -1)


@pytest.mark.slow
def test_draws_that_miss_the_tail_are_found():
    """27 of 4,096 tokens are due to the tail."""
    assert in_tail(low_mode, 4096) < 1e-4


def test_draws_that_follow_the_tail_pass():
    """The test errs once in 10,000 seeds."""
    assert in_tail(draw, 16_384) > 1e-4


def test_rarity_is_the_decade_of_probability():
    p = np.array([[0.9, 0.05, 0.0499999, 1e-7, 3e-9, 0.0]])
    labels = [by_rarity(p, np.array([token]))[0].item() for token in range(6)]
    assert labels == [0, 1, 1, 7, 8, 8]
    np.testing.assert_allclose(
        by_rarity(p, np.array([0]))[1], [[0.9, 0.0999999, 0, 0, 0, 0, 0, 1e-7, 3e-9]]
    )


def test_holm():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
