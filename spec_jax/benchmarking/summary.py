"""The figures of a file of results: what the runs of each system amount to."""

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from spec_jax.benchmarking.results import (
    SPEC_JAX,
    BenchRequest,
    BenchRun,
    Costs,
    Results,
    Setting,
    System,
)

LOOKUPS = ("prompt_lookup", "suffix", "recycle")
"""Methods that run no model to draft: a draft step costs nothing."""
PERCENTILES = (50, 90, 99)


class Spread(NamedTuple):
    """The median of the repeats, and their range."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """The spread of a figure over the repeats."""
        repeats = list(values)
        return cls(statistics.median(repeats), min(repeats), max(repeats))

    def text(self, digits: int = 2) -> str:
        """The label in tables."""
        median, low, high = (f"{each:.{digits}f}" for each in self)
        return median if self.low == self.high else f"{median} ({low} - {high})"


class Cell(NamedTuple):
    """Systems are compared within a cell: same prompts, sampling and batch size."""

    prompts: str
    setting: Setting
    batch_size: int

    @property
    def name(self) -> str:
        """The label in tables."""
        batch = f", batch {self.batch_size}" if self.batch_size > 1 else ""
        return f"{self.prompts}, {self.setting.name}{batch}"


@dataclasses.dataclass
class Measured:
    """One system's runs of a cell, by repeat.

    Attributes:
      baseline: the fastest plain decoding of the cell, if measured.
      plain: this library's plain decoding, the reference of the loop's efficiency.
      costs: of calls of the cell's batch size, if measured.
      category: restricts the requests; None for all.
    """

    cell: Cell
    system: System
    runs: dict[int, BenchRun]
    baseline: "Measured | None" = None
    plain: "Measured | None" = None
    costs: Costs | None = None
    category: str | None = None

    @cached_property
    def _by_repeat(self) -> dict[int, list[BenchRequest]]:
        return {
            repeat: [each for each in run.requests if self.category in (None, each.category)]
            for repeat, run in self.runs.items()
        }

    @property
    def requests(self) -> list[BenchRequest]:
        """The requests of all repeats."""
        return [each for requests in self._by_repeat.values() for each in requests]

    def rates(self) -> dict[int, float]:
        """Tokens a second of each repeat: the mean over requests, as in Spec-Bench.

        In batches it is the sum over rows.
        """
        if self.cell.batch_size > 1 and self.category is None:
            return {
                repeat: sum(each.tokens for each in run.requests) / run.seconds
                for repeat, run in self.runs.items()
                if run.seconds
            }
        return {
            repeat: statistics.fmean(each.tokens_per_second for each in requests)
            for repeat, requests in self._by_repeat.items()
        }

    @property
    def tokens_per_second(self) -> Spread:
        """The spread of `rates`."""
        return Spread.of(self.rates().values())

    @property
    def seconds_per_token(self) -> Spread:
        """Mean time of a token, prompts included."""
        return Spread.of(self._ratios("seconds", "tokens").values())

    @property
    def seconds_per_round(self) -> Spread:
        """Mean time of a round: drafting, scoring and verification."""
        return Spread.of(self._ratios("decode_seconds", "rounds").values())

    def _ratios(self, above: str, below: str) -> dict[int, float]:
        return {
            repeat: _ratio(requests, above, below) for repeat, requests in self._by_repeat.items()
        }

    @property
    def speedup(self) -> Spread | None:
        """Tokens a second over the baseline's, repeat by repeat."""
        return self.against(self.baseline, Measured.rates)

    def against(
        self, other: "Measured | None", figures: Callable[["Measured"], dict[int, float]]
    ) -> Spread | None:
        """Ratios to another system in the repeats that both have."""
        if other is None:
            return None
        theirs = figures(other)
        ratios = [value / theirs[i] for i, value in figures(self).items() if theirs.get(i)]
        return Spread.of(ratios) if ratios else None

    @property
    def tokens_per_call(self) -> float:
        """E: tokens a target call, without prefill."""
        return _ratio(self.requests, "tokens", "rounds")

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None if nothing was drafted."""
        drafted = sum(each.draft_tokens for each in self.requests)
        return sum(each.accepted_tokens for each in self.requests) / drafted if drafted else None

    @property
    def acceptance_per_position(self) -> list[float]:
        """The share of rounds that accepted the token at each draft position."""
        longest = max((len(each.accepted_per_position) for each in self.requests), default=0)
        counts = np.zeros(longest)
        for each in self.requests:
            counts[: len(each.accepted_per_position)] += each.accepted_per_position
        rounds = sum(each.rounds for each in self.requests)
        return (counts / rounds).tolist() if rounds else []

    def percentiles(self, of: Callable[[BenchRequest], float]) -> list[float]:
        """P50, P90 and P99 over the requests of all repeats."""
        return np.percentile([of(each) for each in self.requests], PERCENTILES).tolist()

    @property
    def first_token_seconds(self) -> list[float]:
        """Percentiles of the time to the first token."""
        return self.percentiles(lambda each: each.first_token_seconds)

    @property
    def seconds_per_output_token(self) -> list[float]:
        """Percentiles of the time of each token after the first."""
        return self.percentiles(
            lambda each: (each.seconds - each.first_token_seconds) / max(each.tokens - 1, 1)
        )

    @property
    def predicted_speedup(self) -> float | None:
        """E / (K c + v(K + 1)); None if a cost was not measured or K changes."""
        system = self.system
        usual = (system.library, system.draft_length_policy, system.scoring)
        if self.costs is None or usual != (SPEC_JAX, "constant", "block"):
            return None
        k, c = system.num_speculative_tokens, draft_cost(self.costs, system.method)
        v = relative_cost(self.costs).get(k + 1)
        return None if c is None or v is None else self.tokens_per_call / (k * c + v)

    @property
    def round_seconds(self) -> tuple[float, float, float] | None:
        """A round: drafting and scoring by the cost of their calls, and the rest of its time."""
        if self.predicted_speedup is None or self.costs is None:
            return None
        k, c = self.system.num_speculative_tokens, draft_cost(self.costs, self.system.method)
        call = target_seconds(self.costs)
        draft, score = k * (c or 0.0) * call[1], call[k + 1]
        return draft, score, self.seconds_per_round.median - draft - score

    @property
    def decoding_speedup(self) -> Spread | None:
        """The speed-up over this library's plain decoding, without prompts."""
        return self.against(
            self.plain,
            lambda each: {
                repeat: 1 / seconds
                for repeat, seconds in each._ratios("decode_seconds", "tokens").items()
                if seconds
            },
        )

    @property
    def loop_efficiency(self) -> Spread | None:
        """Measured over predicted speed-up, both without prompts and over our plain decoding."""
        predicted, measured = self.predicted_speedup, self.decoding_speedup
        if predicted is None or measured is None:
            return None
        return Spread(*(each / predicted for each in measured))

    def of_category(self, category: str) -> "Measured":
        """The same, restricted to a category."""
        baseline = self.baseline and dataclasses.replace(
            self.baseline, category=category, baseline=None
        )
        return dataclasses.replace(self, category=category, baseline=baseline)


def _ratio(requests: Sequence[BenchRequest], above: str, below: str) -> float:
    total = sum(getattr(each, below) for each in requests)
    return sum(getattr(each, above) for each in requests) / total if total else 0.0


def target_seconds(costs: Costs) -> dict[int, float]:
    """Tokens scored -> seconds of the target's call."""
    return {
        step.width: statistics.median(step.seconds)
        for step in sorted(costs.steps, key=lambda step: step.width)
        if step.name == "target"
    }


def relative_cost(costs: Costs) -> dict[int, float]:
    """v: tokens scored -> time of the call over a call of one token."""
    seconds = target_seconds(costs)
    return {width: each / seconds[1] for width, each in seconds.items()}


def draft_cost(costs: Costs, method: str) -> float | None:
    """c: a draft step over a target call of one token; None if it was not measured."""
    if method in ("none", *LOOKUPS):
        return 0.0
    steps = {step.name: statistics.median(step.seconds) for step in costs.steps if step.width == 1}
    return steps[method] / target_seconds(costs)[1] if method in steps else None


class Projected(NamedTuple):
    """Speed-ups of decoding for K = 0, 1, ...: the same K in every round, and at most K."""

    same: list[float]
    oracle: list[float]


def projected_speedups(measured: Measured) -> Projected | None:
    """Speed-ups of shorter drafts, from the acceptance by position and the cost of calls.

    The oracle drafts in each round as many tokens as will be accepted, at most K (arXiv 2405.04304,
    section 3). Costs between measured widths are interpolated. None where `predicted_speedup` is.
    """
    if measured.predicted_speedup is None or measured.costs is None:
        return None
    accepted = np.asarray(measured.acceptance_per_position)
    c = draft_cost(measured.costs, measured.system.method) or 0.0
    v = relative_cost(measured.costs)
    lengths = np.arange(len(accepted) + 1)
    cost = lengths * c + np.interp(lengths + 1, list(v), list(v.values()))
    tokens = 1 + np.append(0.0, accepted.cumsum())
    # A round that accepts n or more tokens pays what the n-th adds.
    paid = cost[0] + np.append(0.0, (accepted * np.diff(cost)).cumsum())
    return Projected((tokens / cost).tolist(), (tokens / paid).tolist())


def summarize(results: Results) -> dict[Cell, list[Measured]]:
    """The measured systems of each cell, in the order of the header."""
    runs: dict[Cell, dict[str, dict[int, BenchRun]]] = defaultdict(lambda: defaultdict(dict))
    for run in results.runs:
        cell = Cell(run.prompts, run.setting, run.batch_size)
        runs[cell][run.system][run.repeat] = run
    summaries: dict[Cell, list[Measured]] = {}
    for cell, systems in runs.items():
        measured = summaries[cell] = [
            Measured(cell, system, systems[system.name], costs=results.costs.get(cell.batch_size))
            for system in results.header.systems
            if system.name in systems
        ]
        plain = [each for each in measured if each.system.is_plain]
        fastest = max(plain, key=_speed, default=None)
        ours = next((each for each in plain if each.system.library == SPEC_JAX), None)
        for each in measured:
            each.baseline, each.plain = fastest, ours
    return summaries


def categories(measured: Sequence[Measured]) -> list[str]:
    """The categories of the prompts, in order; empty if they have none."""
    names = dict.fromkeys(request.category for each in measured for request in each.requests)
    return [name for name in names if name]


def best_of_families(measured: Sequence[Measured]) -> list[Measured]:
    """The fastest of the systems that differ in K alone."""
    families: dict[str, list[Measured]] = defaultdict(list)
    for each in measured:
        families[each.system.family].append(each)
    return [max(some, key=_speed) for some in families.values()]


def _speed(measured: Measured) -> float:
    return measured.tokens_per_second.median
