"""Is a change faster? Two files of results, with intervals from the bootstrap."""

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from spec_jax.benchmarking.results import Results
from spec_jax.benchmarking.summary import Cell, Measured, summarize

RESAMPLES = 2000
LEVEL = 0.95
FASTER, SLOWER, UNDECIDED = "faster", "slower", "no difference shown"


class Comparison(NamedTuple):
    """One system in two files: mean tokens a second of its requests, and the second over the first.

    `low` and `high` are the 95 % interval of the ratio.
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
        """What the interval shows."""
        return FASTER if self.low > 1 else SLOWER if self.high < 1 else UNDECIDED


def compare(before: Results, after: Results, seed: int = 0) -> list[Comparison]:
    """The systems that two files share, on the prompts that they share.

    Prompts and repeats are drawn with replacement: the same prompts for both files, since a prompt
    is equally long or hard in both, and repeats for each file separately. The interval does not
    cover a machine that was slower throughout one of the files.
    """
    random = np.random.default_rng(seed)
    digests = {each.name: each.digest for each in before.header.prompts}
    shared = {each.name for each in after.header.prompts if digests.get(each.name) == each.digest}
    systems = [
        {(cell, each.system.name): each for cell, some in summarize(file).items() for each in some}
        for file in (before, after)
    ]
    return [
        _compare(systems[0][key], each, random)
        for key, each in systems[1].items()
        if key in systems[0] and key[0].prompts in shared
    ]


def _compare(before: Measured, after: Measured, random: np.random.Generator) -> Comparison:
    tables = [_by_prompt(each) for each in (before, after)]
    prompts = sorted(tables[0].keys() & tables[1].keys())
    rates = [np.array([table[i] for i in prompts]) for table in tables]  # [prompts, repeats]
    drawn = random.integers(len(prompts), size=(RESAMPLES, len(prompts)))
    means = []
    for each in rates:
        repeats = random.integers(each.shape[1], size=(RESAMPLES, each.shape[1]))
        means.append(each[drawn[:, :, None], repeats[:, None]].mean((1, 2)))
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(means[1] / means[0], (tail, 100 - tail))
    first, second = (float(each.mean()) for each in rates)
    ratio, name = second / first, after.system.name
    return Comparison(after.cell, name, first, second, ratio, float(low), float(high))


def _by_prompt(measured: Measured) -> dict[int, list[float]]:
    """Tokens a second of each prompt, in the order of the repeats."""
    rates: dict[int, list[float]] = defaultdict(list)
    for request in measured.requests:
        rates[request.prompt].append(request.tokens_per_second)
    return rates
