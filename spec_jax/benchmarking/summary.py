"""Figures of a file of results: what each system's runs say together."""

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

LOOKUPS = ("prompt_lookup", "suffix")
"""Methods that run no model to draft: a draft step costs nothing."""
PERCENTILES = (50, 90, 99)


class Spread(NamedTuple):
    """The median of the repeats, and their range."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """The spread of one figure a repeat."""
        found = list(values)
        return cls(statistics.median(found), min(found), max(found))

    def text(self, digits: int = 2) -> str:
        """As tables have it."""
        if self.least == self.most:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.least:.{digits}f} - {self.most:.{digits}f})"


class Cell(NamedTuple):
    """What is compared with each other: systems that decoded the same prompts alike."""

    prompts: str
    setting: Setting
    batch_size: int

    @property
    def name(self) -> str:
        """As tables have it."""
        batch = f", batch {self.batch_size}" if self.batch_size > 1 else ""
        return f"{self.prompts}, {self.setting.name}{batch}"


@dataclasses.dataclass
class Measured:
    """One system's runs of a cell.

    Attributes:
      cell: what was decoded.
      system: by what.
      runs: one a repeat that was measured.
      baseline: the fastest plain decoding of the cell; None if none was measured.
      plain: this library's plain decoding, against which the loop's efficiency counts.
      costs: of calls of the cell's batch size; None if they were not measured.
      category: the only one that counts; None for all.
    """

    cell: Cell
    system: System
    runs: dict[int, BenchRun]
    baseline: "Measured | None" = None
    plain: "Measured | None" = None
    costs: Costs | None = None
    category: str | None = None

    def requests_of(self, run: BenchRun) -> list[BenchRequest]:
        """A run's requests, of the category if one is chosen."""
        return [each for each in run.requests if self.category in (None, each.category)]

    @cached_property
    def requests(self) -> list[BenchRequest]:
        """The requests of all repeats."""
        return [each for run in self.runs.values() for each in self.requests_of(run)]

    def rates(self) -> dict[int, float]:
        """Tokens a second of each repeat.

        The mean over requests, as Spec-Bench has it; in batches that of all rows together.
        """
        if self.cell.batch_size > 1 and self.category is None:
            return {
                repeat: sum(each.tokens for each in run.requests) / run.seconds
                for repeat, run in self.runs.items()
                if run.seconds
            }
        return {
            repeat: statistics.fmean(each.tokens_per_second for each in self.requests_of(run))
            for repeat, run in self.runs.items()
        }

    @property
    def tokens_per_second(self) -> Spread:
        """The spread of `rates`."""
        return Spread.of(self.rates().values())

    @property
    def seconds_per_token(self) -> Spread:
        """Mean time of a token, prompts included."""
        return self._per_repeat(lambda requests: _ratio(requests, "seconds", "tokens"))

    @property
    def seconds_per_round(self) -> Spread:
        """Mean time of a loop: drafting, scoring and verification."""
        return self._per_repeat(lambda requests: _ratio(requests, "decode_seconds", "rounds"))

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
        own, theirs = figures(self), figures(other)
        both = [own[each] / theirs[each] for each in own if theirs.get(each)]
        return Spread.of(both) if both else None

    @property
    def tokens_per_call(self) -> float:
        """Tokens that a target call gave, prompts' calls apart: E."""
        return _ratio(self.requests, "tokens", "rounds")

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None if nothing was drafted."""
        drafted = sum(each.draft_tokens for each in self.requests)
        return sum(each.accepted_tokens for each in self.requests) / drafted if drafted else None

    @property
    def acceptance_per_position(self) -> list[float]:
        """Of each draft position, the share of rounds that kept its token."""
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
        if self.costs is None or self.system.library != SPEC_JAX:
            return None
        if self.system.draft_length_policy != "constant" or self.system.scoring != "block":
            return None
        k, c = self.system.num_speculative_tokens, draft_cost(self.costs, self.system.method)
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
        """Against this library's plain decoding, prompts apart."""
        return self.against(
            self.plain,
            lambda each: {
                repeat: 1 / _ratio(each.requests_of(run), "decode_seconds", "tokens")
                for repeat, run in each.runs.items()
                if any(request.decode_seconds for request in run.requests)
            },
        )

    @property
    def loop_efficiency(self) -> Spread | None:
        """Measured over predicted speed-up, both of decoding alone and against our plain one."""
        predicted, measured = self.predicted_speedup, self.decoding_speedup
        if predicted is None or measured is None:
            return None
        return Spread(*(each / predicted for each in measured))

    def of_category(self, category: str) -> "Measured":
        """The same of one category alone."""
        baseline = self.baseline and dataclasses.replace(
            self.baseline, category=category, baseline=None
        )
        return dataclasses.replace(self, category=category, baseline=baseline)

    def _per_repeat(self, of: Callable[[list[BenchRequest]], float]) -> Spread:
        return Spread.of(of(self.requests_of(run)) for run in self.runs.values())


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
    """v: tokens scored -> time of the call over that of one token."""
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
    """What shorter drafts would give, from the acceptance by position and the cost of calls.

    The oracle drafts in each round as many tokens as will be accepted (arXiv 2405.04304,
    section 3), at most K. Costs of widths that were not measured lie on lines between those that
    were. None where `predicted_speedup` is.
    """
    if measured.predicted_speedup is None or measured.costs is None:
        return None
    kept = np.asarray(measured.acceptance_per_position)
    c = draft_cost(measured.costs, measured.system.method) or 0.0
    v = relative_cost(measured.costs)
    lengths = np.arange(len(kept) + 1)
    cost = lengths * c + np.interp(lengths + 1, list(v), list(v.values()))
    tokens = 1 + np.append(0.0, kept.cumsum())
    # A round that accepts n or more tokens pays what the n-th adds.
    paid = cost[0] + np.append(0.0, (kept * np.diff(cost)).cumsum())
    return Projected((tokens / cost).tolist(), (tokens / paid).tolist())


def summarize(results: Results) -> dict[Cell, list[Measured]]:
    """Each cell's systems, in the order of the file's head; what was not measured is left out."""
    runs: dict[Cell, dict[str, dict[int, BenchRun]]] = defaultdict(lambda: defaultdict(dict))
    for run in results.runs:
        cell = Cell(run.prompts, run.setting, run.batch_size)
        runs[cell][run.system][run.repeat] = run
    found: dict[Cell, list[Measured]] = {}
    for cell, systems in runs.items():
        several = [
            Measured(cell, system, systems[system.name], costs=results.costs.get(cell.batch_size))
            for system in results.header.systems
            if system.name in systems
        ]
        plain = [each for each in several if each.system.is_plain]
        fastest = max(plain, key=lambda each: each.tokens_per_second.median, default=None)
        own = next((each for each in plain if each.system.library == SPEC_JAX), None)
        for each in several:
            each.baseline, each.plain = fastest, own
        found[cell] = several
    return found


def categories(measured: Sequence[Measured]) -> list[str]:
    """The categories of the prompts, in order; empty if they have none."""
    names = dict.fromkeys(request.category for each in measured for request in each.requests)
    return [name for name in names if name]


def best_of_families(measured: Sequence[Measured]) -> list[Measured]:
    """Of systems that differ in K alone the fastest."""
    best: dict[str, Measured] = {}
    for each in measured:
        name = each.system.family
        if name not in best or each.tokens_per_second.median > best[name].tokens_per_second.median:
            best[name] = each
    return list(best.values())
