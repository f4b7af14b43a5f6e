"""Tests of sampled tokens against exact conditional distributions.

Every drawn token is compared with its own distribution given the tokens before it. Over bins, the
sum of (indicator - expected) is then a sum of martingale differences, whatever texts the rows went
through; its covariance is the sum of the multinomial ones, and the quadratic form of both is
chi-square distributed. For one context this is Pearson's test.
"""

import dataclasses
import math
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from scipy import optimize, stats

MAX_LISTED = 64
"""The largest vocabulary whose tokens have a bin each; larger ones are binned by rank."""
MIN_VARIANCE = 25.0
"""The smallest variance of a bin's count; bins with a smaller one are merged."""
MIN_EXPECTED = 5.0
"""Cells in which fewer are expected are merged."""
QUANTILE_BINS = 16
PAIR_BINS = 4
RARITY_BINS = 9
"""Decades of probability; the last bin takes all tokens rarer than 1e-8."""
POWER = 0.9

Indices = Int[np.ndarray, " count"]
Probabilities = Float[np.ndarray, "count vocab"]
Binned = tuple[Indices, Float[np.ndarray, "count bins"]]
"""The bin that each token fell into, and each bin's probability beforehand."""


@dataclasses.dataclass(frozen=True)
class Test:
    """The outcome of one chi-square test of `count` tokens, with `freedom` degrees of freedom.

    The p-value is not corrected for the other tests.
    """

    name: str
    count: int
    freedom: int
    p_value: float

    def detectable(self, alpha: float) -> float:
        """The smallest deviation (Cohen's w) that a test at level alpha finds, with 90 % power."""
        critical = float(stats.chi2.isf(alpha, self.freedom))

        def missing(noncentrality: float) -> float:
            return POWER - float(stats.ncx2.sf(critical, self.freedom, noncentrality))

        high = 2 * critical
        while missing(high) > 0:
            high *= 2
        noncentrality: Any = optimize.brentq(missing, 0.0, high)
        return math.sqrt(noncentrality / self.count)


class Tally:
    """Sums over drawn tokens of (indicator - expected) in each bin, and their covariance."""

    def __init__(self, bins: int):
        self.count = 0
        self._difference, self._expected = np.zeros((2, bins))
        self._products = np.zeros((bins, bins))

    def add(self, drawn: Indices, expected: Float[np.ndarray, "count bins"]):
        """Adds tokens: the bin that each fell into, and each bin's probability beforehand."""
        total = expected.sum(0)
        self.count += len(drawn)
        self._difference += np.bincount(drawn, minlength=len(total)) - total
        self._expected += total
        self._products += expected.T @ expected

    def test(self, name: str) -> Test | None:
        """The test of everything that was added, or None if no bin varies enough."""
        covariance = np.diag(self._expected) - self._products
        merge = _merging(np.diag(covariance))
        covariance, difference = merge @ covariance @ merge.T, merge @ self._difference
        values, vectors = np.linalg.eigh(covariance)
        # A bin that hardly varies is not normally distributed: one rare event would reject.
        varied = values > MIN_VARIANCE / 2
        if not varied.any():
            return None
        statistic = float(((vectors[:, varied].T @ difference) ** 2 / values[varied]).sum())
        freedom = int(varied.sum())
        return Test(name, self.count, freedom, float(stats.chi2.sf(statistic, freedom)))


def _merging(variance: Float[np.ndarray, " bins"]) -> Float[np.ndarray, "groups bins"]:
    """Groups of bins as rows of zeros and ones: the rare ones share a group."""
    rare = variance < MIN_VARIANCE
    common = np.flatnonzero(~rare)
    groups = np.zeros((len(common) + 1, len(variance)))
    groups[np.arange(len(common)), common] = 1
    groups[-1, rare] = 1
    return groups


def pearson(
    name: str, counts: Float[np.ndarray, "*cells"], probabilities: Float[np.ndarray, "*cells"]
) -> Test:
    """The chi-square test of counts against exact probabilities, rare cells merged.

    A count where the probability is zero has a p-value of 0.
    """
    observed, total = counts.ravel(), int(counts.sum())
    expected = probabilities.ravel() * total
    impossible = bool(observed[expected == 0].sum())
    rare = expected < MIN_EXPECTED
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    freedom = len(expected) - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    p_value = 0.0 if impossible else float(stats.chi2.sf(statistic, freedom)) if freedom else 1.0
    return Test(name, total, max(1, freedom), p_value)


def holm(p_values: list[float]) -> list[float]:
    """p-values corrected for each other (Holm 1979), in the order given."""
    order = np.argsort(p_values, kind="stable")
    factors = len(p_values) - np.arange(len(p_values))
    corrected = np.empty(len(p_values))
    scaled = np.minimum(1.0, np.asarray(p_values)[order] * factors)
    corrected[order] = np.maximum.accumulate(scaled)
    return corrected.tolist()


def by_token(p: Probabilities, tokens: Indices) -> Binned:
    """A bin for each token of a small vocabulary, else for ranks 1, 2-3, 4-7 and so on."""
    vocab = p.shape[1]
    if vocab <= MAX_LISTED:
        return tokens, p
    starts = 2 ** np.arange(vocab.bit_length()) - 1
    expected = np.add.reduceat(-np.sort(-p, axis=1), starts[starts < vocab], axis=1)
    p_token, ids = p[np.arange(len(p)), tokens][:, None], np.arange(vocab)
    rank = (p > p_token).sum(1) + ((p == p_token) & (ids < tokens[:, None])).sum(1)
    return np.log2(rank + 1).astype(np.int64), expected


def by_rarity(p: Probabilities, tokens: Indices) -> Binned:
    """Bins of log10 p: noise that is too coarse draws too few rare tokens."""
    with np.errstate(divide="ignore"):
        label = np.minimum(-np.log10(p), RARITY_BINS - 1).astype(np.int64)
    label = np.maximum(label, 0)  # a sum of 1 may have been rounded up
    rows = np.arange(len(p))
    cells = (rows[:, None] * RARITY_BINS + label).ravel()
    expected = np.bincount(cells, p.ravel(), minlength=len(p) * RARITY_BINS)
    # Of no row at all NumPy counts in integers.
    return label[rows, tokens], expected.reshape(len(p), RARITY_BINS).astype(np.float64)


def by_ratio(p: Probabilities, q: Probabilities, tokens: Indices) -> Binned:
    """Bins by p / q, with edges 1/2, 1 and 2: tokens that the draft over- and underestimates."""
    label = (2 * p > q).astype(np.int64) + (p > q) + (p > 2 * q)
    expected = np.stack([np.where(label == each, p, 0).sum(1) for each in range(4)], 1)
    return label[np.arange(len(p)), tokens], expected


def quantiles(
    p: Probabilities, tokens: Indices, random: np.random.Generator
) -> Float[np.ndarray, " count"]:
    """The quantile of each token in its distribution, at random within the token's own interval.

    Given the tokens before (Rosenblatt 1952), these are independent and uniform in [0, 1).
    """
    p_token = p[np.arange(len(p)), tokens]
    below = np.where(np.arange(p.shape[1]) < tokens[:, None], p, 0).sum(1)
    return np.clip(below + random.random(len(p)) * p_token, 0, 1 - 1e-9)


def by_quantile(at: Float[np.ndarray, " count"]) -> Binned:
    """Equal bins of quantiles: they show errors that depend on the order of ids."""
    expected = np.full((len(at), QUANTILE_BINS), 1 / QUANTILE_BINS)
    return (at * QUANTILE_BINS).astype(np.int64), expected


def by_index(p: Probabilities, tokens: Indices, accepted: int) -> Binned:
    """Bins of ids below, at and above the number of accepted tokens.

    JAX's random bits are a function of key and index. If acceptance and the next token share a
    key, token i is drawn with the number that decided the i-th draft token: small ones for those
    accepted, a large one for the one rejected.
    """
    label = 1 + np.sign(np.arange(p.shape[1]) - accepted)
    expected = np.stack([p[:, label == each].sum(1) for each in range(3)], 1)
    return label[tokens], expected


def by_pair(before: Float[np.ndarray, " count"], at: Float[np.ndarray, " count"]) -> Binned:
    """Bins of pairs of quantiles: only these show shared random numbers."""
    first, second = ((each * PAIR_BINS).astype(np.int64) for each in (before, at))
    expected = np.repeat(np.eye(PAIR_BINS)[first] / PAIR_BINS, PAIR_BINS, axis=1)
    return first * PAIR_BINS + second, expected
