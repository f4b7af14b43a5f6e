"""Is a change faster? Two files of results, with intervals from the bootstrap."""

import dataclasses
from collections import defaultdict

import numpy as np
from jaxtyping import Float

from spec_jax.benchmarking.results import Results
from spec_jax.benchmarking.summary import Cell, Measured, summarize

RESAMPLES = 2000
LEVEL = 0.95
FASTER, SLOWER, UNDECIDED = "faster", "slower", "no difference shown"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One system in two files.

    Attributes:
      cell: what was decoded.
      system: by what.
      before, after: mean tokens a second of its requests, in the first and the second file.
      ratio: the second over the first.
      low, high: of the 95 % interval of the ratio.
    """

    cell: Cell
    system: str
    before: float
    after: float
    ratio: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """What the interval says."""
        return FASTER if self.low > 1 else SLOWER if self.high < 1 else UNDECIDED


def compare(before: Results, after: Results, seed: int = 0) -> list[Comparison]:
    """The systems that two files have in common, on the prompts that they have in common.

    Prompts and repeats are drawn with replacement: the same prompts for both files, as they are
    equally long or hard in both, and repeats in each file for itself. A machine that was slower
    throughout one of the files is not in the interval.
    """
    random = np.random.default_rng(seed)
    digests = {each.name: each.digest for each in before.header.prompts}
    same = {each.name for each in after.header.prompts if digests.get(each.name) == each.digest}
    earlier = {
        (cell, each.system.name): each
        for cell, several in summarize(before).items()
        for each in several
    }
    found = []
    for cell, several in summarize(after).items():
        for each in several:
            other = earlier.get((cell, each.system.name))
            if other is not None and cell.prompts in same:
                found.append(_compare(cell, each.system.name, other, each, random))
    return found


def _compare(
    cell: Cell, system: str, before: Measured, after: Measured, random: np.random.Generator
) -> Comparison:
    tables = [_by_prompt(each) for each in (before, after)]
    prompts = sorted(tables[0].keys() & tables[1].keys())
    rates = [np.array([table[i] for i in prompts]) for table in tables]  # [prompts, repeats]
    drawn = random.integers(len(prompts), size=(RESAMPLES, len(prompts)))
    means = [_resampled(each, drawn, random) for each in rates]
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(means[1] / means[0], (tail, 100 - tail))
    first, second = (float(each.mean()) for each in rates)
    return Comparison(cell, system, first, second, second / first, float(low), float(high))


def _by_prompt(measured: Measured) -> dict[int, list[float]]:
    """Tokens a second of each prompt, in the order of the repeats."""
    found: dict[int, list[float]] = defaultdict(list)
    for run in measured.runs.values():
        for request in run.requests:
            found[request.prompt].append(request.tokens_per_second)
    return found


def _resampled(
    rates: Float[np.ndarray, "prompts repeats"], drawn: np.ndarray, random: np.random.Generator
) -> Float[np.ndarray, " resamples"]:
    """Mean rates over drawn prompts and, for all of them alike, drawn repeats."""
    repeats = random.integers(rates.shape[1], size=(len(drawn), rates.shape[1]))
    return np.array(
        [rates[np.ix_(rows, columns)].mean() for rows, columns in zip(drawn, repeats, strict=True)]
    )
