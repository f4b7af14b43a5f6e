"""Whether two ways of decoding answer equally well: paired differences of scores.

Answers to one item resemble each other, so items are what is counted: the score of an item is the
mean of its answers' scores, and an interval is Student's, over items. Items may have weights, such
as words of a reference; the weighted mean is then a ratio of two means, whose variance is
linearised (Cochran, Sampling Techniques, 1977, section 6.4). With equal weights this is the paired
t-test.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import stats

LEVEL = 0.95
"""Confidence level: one lossless run in twenty is called different by chance."""
MIN_ITEMS = 2
"""An interval needs this many items."""
NO_DIFFERENCE, DIFFERENT, NOT_TESTED = "no difference", "DIFFERENT", "NOT TESTED"


class Scale(NamedTuple):
    """What a score means; `bounded` ones are between 0 and 1.

    `worthless` is the score of an answer that shows nothing, or None if there is none.
    """

    name: str
    worthless: float | None = 0.0
    higher_is_better: bool = True
    bounded: bool = True

    def show_nothing(self, scores: Float[np.ndarray, "items samples"]) -> bool:
        """Whether no score is better than `worthless`."""
        if self.worthless is None:
            return False
        worse = scores <= self.worthless if self.higher_is_better else scores >= self.worthless
        return bool(worse.all())


class Estimate(NamedTuple):
    """A mean and its interval at `LEVEL`."""

    mean: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval's width."""
        return (self.high - self.low) / 2

    def within(self, scale: Scale) -> "Estimate":
        """With the interval cut at the scale's bounds."""
        if not scale.bounded:
            return self
        return Estimate(self.mean, max(0.0, self.low), min(1.0, self.high))


def estimate(
    scores: Float[np.ndarray, " items"], weights: Float[np.ndarray, " items"] | None = None
) -> Estimate:
    """The weighted mean of independent items, at least two, with Student's interval."""
    count = len(scores)
    shares = np.full(count, 1 / count) if weights is None else weights / weights.sum()
    mean = math.fsum(shares * scores)
    squares = math.fsum((shares * (scores - mean)) ** 2)
    error = math.sqrt(count / (count - 1) * squares)
    half = float(stats.t.ppf((1 + LEVEL) / 2, count - 1)) * error
    return Estimate(mean, mean - half, mean + half)


@dataclasses.dataclass(frozen=True)
class Parity:
    """Two ways of decoding, compared on the same items.

    Attributes:
      items: how many there are.
      difference: speculative less plain, item by item.
      verdict: `no difference` if the interval of the difference holds 0, else `DIFFERENT`;
        `NOT TESTED` if there was nothing to see.
      detectable: the smallest difference that the run could have seen: half of the interval. If all
        items have equal scores, the interval is empty; then the share of items whose scores would
        have to differ for one to be seen in `LEVEL` of all runs, or None for unbounded scores.
      reason: why it was not tested, or empty.
    """

    scale: Scale
    items: int
    plain: Estimate
    speculative: Estimate
    difference: Estimate
    verdict: str
    detectable: float | None
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        estimates = ("plain", "speculative", "difference")
        return {
            "score": self.scale.name,
            "items": self.items,
            **{name: getattr(self, name)._asdict() for name in estimates},
            "level": LEVEL,
            "verdict": self.verdict,
            "detectable": self.detectable,
            "not_tested_because": self.reason or None,
        }


def compare(
    scale: Scale,
    plain: Float[np.ndarray, "items samples"],
    speculative: Float[np.ndarray, "items samples"],
    weights: Float[np.ndarray, " items"] | None = None,
    reason: str = "",
) -> Parity:
    """Compares the scores of two ways of decoding.

    Args:
      scale: the meaning of the scores.
      plain: scores of plain decoding, for each item and answer.
      speculative: scores of the method on the same items.
      weights: how much each item counts; equal if None.
      reason: why the comparison tests nothing, if that is known already.
    """
    means = [np.asarray(scores, np.float64).mean(1) for scores in (plain, speculative)]
    difference = means[1] - means[0]
    interval = estimate(difference, weights)
    if not reason and scale.show_nothing(plain) and scale.show_nothing(speculative):
        reason = f"no answer of either scored better than {scale.worthless:g}"
    holds_0 = interval.low <= 0 <= interval.high
    verdict = NOT_TESTED if reason else NO_DIFFERENCE if holds_0 else DIFFERENT
    detectable: float | None = interval.half_width
    if not difference.any():
        unseen = 1 - (1 - LEVEL) ** (1 / len(difference))
        detectable = unseen if scale.bounded else None
    return Parity(
        scale,
        len(difference),
        estimate(means[0], weights).within(scale),
        estimate(means[1], weights).within(scale),
        interval,
        verdict,
        detectable,
        reason,
    )
