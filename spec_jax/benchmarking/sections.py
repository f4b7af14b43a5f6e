"""The sections of a report: figures and tables of the measurements."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from spec_jax.benchmarking.comparison import LEVEL, compare
from spec_jax.benchmarking.doubts import doubts
from spec_jax.benchmarking.figures import Plot
from spec_jax.benchmarking.results import SPEC_JAX, Costs, Results
from spec_jax.benchmarking.summary import (
    Cell,
    Measured,
    Spread,
    best_of_families,
    categories,
    draft_cost,
    projected_speedups,
    relative_cost,
)

Cells = Mapping[Cell, list[Measured]]
Columns = Mapping[str, Callable[[Any], str]]
"""Head of a column -> the text for an item."""
SYSTEM: Columns = {
    "domain": lambda each: each.cell.name,
    "system": lambda each: each.system.name,
}


class Figure(NamedTuple):
    """A plot and its caption."""

    plot: Plot
    caption: str


class ReportTable(NamedTuple):
    """A table; a folded one shows its caption only until it is opened."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False


@dataclasses.dataclass(frozen=True)
class ReportSection:
    """Figures and tables under a title."""

    title: str
    text: str = ""
    figures: Sequence[Figure] = ()
    tables: Sequence[ReportTable] = ()


def sections_of(cells: Cells) -> list[ReportSection]:
    """All sections with content, in order."""
    singles = {cell: each for cell, each in cells.items() if cell.batch_size == 1} or cells
    sections = [
        _doubts(cells),
        _token_time(singles),
        *_by_lookahead(singles),
        _predicted(singles),
        _projected(singles),
        _by_temperature(cells),
        _by_batch_size(cells),
        _by_position(singles),
        _by_category(singles),
        _costs(cells),
        _all(cells),
    ]
    return [section for section in sections if section.figures or section.tables]


def comparison(names: tuple[str, str], before: Results, after: Results) -> ReportSection:
    """How two files differ in the systems that they share."""
    columns: Columns = {
        **SYSTEM,
        "system": lambda each: each.system,
        "tokens/s before": lambda each: f"{each.before:.1f}",
        "after": lambda each: f"{each.after:.1f}",
        "after / before": lambda each: f"{each.ratio:.3f} ({each.low:.3f} - {each.high:.3f})",
        "verdict": lambda each: each.verdict,
    }
    caption = f"after: {names[1]}; before: {names[0]}"
    tables = _table(caption, compare(before, after), columns)
    text = (
        f"Mean tokens a second of requests; {LEVEL:.0%} intervals by bootstrap over prompts and "
        "repeats. The files were not measured in turns: the interval does not cover a machine that "
        "was slower during one of them."
    )
    if not tables:
        text = f"{names[1]} and {names[0]} share no system, prompts and sampling parameters."
    return ReportSection("Is it faster?", text, tables=tables)


def _doubts(cells: Cells) -> ReportSection:
    rows = [
        (each, doubt) for measured in cells.values() for each in measured for doubt in doubts(each)
    ]
    columns: Columns = {
        **{name: lambda row, text=text: text(row[0]) for name, text in SYSTEM.items()},
        "what contradicts itself": lambda row: row[1],
    }
    return ReportSection(
        "Measured beside other work",
        "These figures contradict themselves or vary much: the machine had other work meanwhile. "
        "Measure again on an idle machine before you trust any figure of this file.",
        tables=_table("Figures that cannot all be true", rows, columns),
    )


def _token_time(cells: Cells) -> ReportSection:
    best = [each for measured in cells.values() for each in best_of_families(measured)]
    columns: Columns = {
        **SYSTEM,
        "mean token time, ms": lambda each: _milliseconds(each.seconds_per_token).text(),
        "speed-up": lambda each: _text(each.speedup),
        "tokens a target call": lambda each: f"{each.tokens_per_call:.2f}",
    }
    return ReportSection(
        "Mean token time",
        "The fastest K of each method, beside plain decoding. Times are of whole requests, prompts "
        "included: medians and ranges of the repeats. The speed-up is the mean of tokens a second "
        "over the fastest plain decoding, as in Spec-Bench; in batches, tokens a second "
        "are the sum over rows.",
        tables=_table("After table 1 of arXiv 2302.01318", best, columns),
    )


def _by_lookahead(cells: Cells) -> list[ReportSection]:
    families: dict[str, dict[Cell, list[Measured]]] = defaultdict(lambda: defaultdict(list))
    for cell, measured in cells.items():
        plain = measured[0].plain
        for each in measured:
            if not each.system.is_plain:
                families[each.system.family][cell].append(each)
        for family in families.values():
            if cell in family and plain is not None and family[cell][0].system.library == SPEC_JAX:
                family[cell].append(plain)
    panels: Sequence[tuple[str, str, Callable[[Measured], Any]]] = (
        ("mean token time, ms", "Time", lambda each: _milliseconds(each.seconds_per_token)),
        ("speed-up", "Against the fastest plain decoding", lambda each: each.speedup),
        (
            "tokens a call / (K + 1)",
            "Share of a round that is kept, bonus token included",
            lambda each: each.tokens_per_call / (each.system.num_speculative_tokens + 1),
        ),
        ("loop time, ms", "A round", lambda each: _milliseconds(each.seconds_per_round)),
    )
    text = (
        "After figure 1 of arXiv 2302.01318; K = 0 is plain decoding. Bars are the range of the "
        "repeats."
    )

    def figure(by_cell: Cells, label: str, caption: str, value: Callable) -> Figure:
        series = {
            cell.name: [(_k(each), value(each)) for each in measured]
            for cell, measured in by_cell.items()
        }
        return _figure(series, "K", label, caption, 1.0 if label == "speed-up" else None)

    return [
        ReportSection(f"By K: {family}", text, [figure(by_cell, *panel) for panel in panels])
        for family, by_cell in families.items()
        if len({_k(each) for measured in by_cell.values() for each in measured}) > 1
    ]


def _k(measured: Measured) -> int:
    return measured.system.num_speculative_tokens


def _predicted(cells: Cells) -> ReportSection:
    rows = [
        each
        for measured in cells.values()
        for each in measured
        if not each.system.is_plain and each.costs and each.loop_efficiency
    ]
    columns: Columns = {
        **SYSTEM,
        "E": lambda each: f"{each.tokens_per_call:.2f}",
        "c": lambda each: f"{draft_cost(each.costs, each.system.method):.3f}",
        "v(K + 1)": lambda each: f"{relative_cost(each.costs)[_k(each) + 1]:.2f}",
        "E / (K c + v)": lambda each: f"{each.predicted_speedup:.2f}",
        "loop efficiency": lambda each: each.loop_efficiency.text(),
        "a round, ms: draft + score + rest": lambda each: " + ".join(
            f"{1000 * part:.2f}" for part in each.round_seconds or ()
        ),
    }
    return ReportSection(
        "Why this K",
        "E: tokens a target call. c: a draft step over a target call of one token. v(n): a call "
        "that scores n tokens over one that scores one. Loop efficiency is the measured speed-up "
        "of decoding, without prompts and against our own plain decoding, over "
        "E / (K c + v(K + 1)). Draft and score are the costs of those calls alone; the rest is "
        "the remaining time of a round.",
        tables=_table("Predicted by the cost of calls", rows, columns),
    )


def _projected(cells: Cells) -> ReportSection:
    figures = []
    for cell, measured in cells.items():
        families: dict[str, list[Measured]] = defaultdict(list)
        for each in measured:
            if not each.system.is_plain:
                families[each.system.family].append(each)
        for family, members in families.items():
            if (projected := projected_speedups(max(members, key=_k))) is None:
                continue
            series = {
                "the same K in every round": enumerate(projected.same),
                "oracle, at most K": enumerate(projected.oracle),
                "measured": [(_k(each), each.decoding_speedup) for each in members],
            }
            figures.append(
                _figure(series, "K", "speed-up of decoding", f"{cell.name}, {family}", 1)
            )
    return ReportSection(
        "What a better draft length could gain",
        "The oracle knows in advance how many tokens of a draft will be accepted, and drafts no "
        "more (arXiv 2405.04304, section 3). Both lines are projected from the acceptance by "
        "position of the largest K and from the cost of calls: E / (K c + v(K + 1)), where the "
        "oracle pays n c + v(n + 1) for a round that accepts n. Prompts are not included.",
        figures,
    )


def _by_temperature(cells: Cells) -> ReportSection:
    groups: dict[str, dict[float, list[Measured]]] = defaultdict(dict)
    for cell, measured in cells.items():
        temperature, top_ps = cell.setting.temperature, {cell.setting.top_p}
        if not temperature:  # the same for every top-p
            top_ps = {other.setting.top_p for other in cells}
        for top_p in top_ps:
            batch = f", batch {cell.batch_size}" if cell.batch_size > 1 else ""
            nucleus = f", top-p {top_p:g}" if top_p < 1 else ""
            groups[f"{cell.prompts}{batch}{nucleus}"][temperature] = measured
    figures = _speedups(groups, "temperature")
    return ReportSection("By temperature", "The fastest K of each method.", figures)


def _by_batch_size(cells: Cells) -> ReportSection:
    groups: dict[str, dict[float, list[Measured]]] = defaultdict(dict)
    for cell, measured in cells.items():
        groups[f"{cell.prompts}, {cell.setting.name}"][cell.batch_size] = measured
    text = "The fastest K of each method, against plain decoding of the same batch size."
    return ReportSection("By batch size", text, _speedups(groups, "batch size"))


def _speedups(groups: Mapping[str, dict[float, list[Measured]]], x: str) -> list[Figure]:
    """A figure for each group of several places: each family's fastest speed-up there."""
    figures = []
    for caption, by_place in groups.items():
        series: dict[str, list[tuple[float, Spread | None]]] = defaultdict(list)
        for place, measured in by_place.items():
            for each in best_of_families(measured):
                if each is not each.baseline:
                    series[each.system.family].append((place, each.speedup))
        if len(by_place) > 1:
            figures.append(_figure(series, x, "speed-up", caption, 1.0))
    return figures


def _by_position(cells: Cells) -> ReportSection:
    families: dict[str, dict[str, Measured]] = defaultdict(dict)
    for cell, measured in cells.items():
        for each in sorted(measured, key=_k):
            if each.acceptance_per_position:
                families[each.system.family][cell.name] = each  # the largest K stays
    figures = [
        _figure(
            {name: enumerate(each.acceptance_per_position, 1) for name, each in by_cell.items()},
            "position in the draft",
            "rounds that keep it",
            f"{family}, K = {_k(next(iter(by_cell.values())))}",
        )
        for family, by_cell in families.items()
    ]
    return ReportSection("Acceptance by position", "", figures)


def _by_category(cells: Cells) -> ReportSection:
    def text(each: Measured) -> str:
        return f"{_text(each.speedup)} / {each.tokens_per_call:.2f}"

    tables: list[ReportTable] = []
    for cell, measured in cells.items():
        columns: dict[str, Callable[[Any], str]] = {"category": str}
        for each in best_of_families(measured):
            columns[each.system.name] = lambda name, each=each: text(each.of_category(name))
        caption = f"{cell.name}: speed-up / tokens a target call"
        tables += _table(caption, categories(measured), columns)
    return ReportSection("By category", "The K of each method that is fastest overall.", (), tables)


def _costs(cells: Cells) -> ReportSection:
    by_size = {each.cell.batch_size: each.costs for some in cells.values() for each in some}
    measured = [costs for costs in by_size.values() if costs is not None]
    figures = []
    for costs in measured:
        name, v = f"batch {costs.batch_size}", relative_cost(costs)
        if len(v) > 1:
            figures.append(
                _figure({name: v.items()}, "tokens scored", "v(n)", f"A target call, {name}", 1.0)
            )

    def step(costs: Costs) -> Spread:
        return Spread.of(*(s.seconds for s in costs.steps if (s.name, s.width) == ("target", 1)))

    def rate(costs: Costs) -> float:
        return costs.weight_bytes / step(costs).median

    columns: Columns = {
        "rows": lambda each: f"batch {each.batch_size}",
        "target call, ms": lambda each: _milliseconds(step(each)).text(),
        "c": lambda each: ", ".join(
            f"{s.name} {draft_cost(each, s.name):.3f}" for s in each.steps if s.name != "target"
        ),
        "weights, GB/s": lambda each: f"{rate(each) / 1e9:.1f}",
        "of streaming": lambda each: f"{rate(each) / each.streaming:.2f}" if each.streaming else "",
    }
    tables = _table("Calls alone, in a loop on the device", measured, columns)
    return ReportSection("What calls cost", "", figures, tables)


def _all(cells: Cells) -> ReportSection:
    def percentile(name: str, number: int) -> Callable[[Measured], str]:
        return lambda each: f"{1000 * getattr(each, name)[number]:.1f}"

    columns: dict[str, Callable[[Any], str]] = {
        "system": SYSTEM["system"],
        "tokens/s": lambda each: each.tokens_per_second.text(1),
        "speed-up": lambda each: _text(each.speedup),
        "tokens a call": lambda each: f"{each.tokens_per_call:.2f}",
        "accepted": lambda each: (
            "" if each.acceptance_rate is None else f"{each.acceptance_rate:.3f}"
        ),
    }
    labels = {"first_token_seconds": "first token", "seconds_per_output_token": "token"}
    for name, label in labels.items():
        for number, rank in enumerate(("P50, ms", "P90", "P99")):
            columns[f"{label} {rank}"] = percentile(name, number)
    tables = [
        table
        for cell, measured in cells.items()
        for table in _table(cell.name, measured, columns, folded=True)
    ]
    text = "Percentiles are over the requests of all repeats, and of tokens after the first."
    return ReportSection("All systems", text, tables=tables)


def _table(
    caption: str, items: Sequence[Any], columns: Columns, folded: bool = False
) -> list[ReportTable]:
    """A table with a row for each item; none without items."""
    rows = [[column(item) for column in columns.values()] for item in items]
    return [ReportTable(caption, list(columns), rows, folded)] if rows else []


def _figure(
    series: Mapping[str, Iterable[tuple[float, Any]]],
    x: str,
    y: str,
    caption: str,
    reference: float | None = None,
) -> Figure:
    """A figure of the points that have a value."""
    points = {
        label: [each for each in some if each[1] is not None] for label, some in series.items()
    }
    return Figure(Plot({k: v for k, v in points.items() if v}, x, y, reference), caption)


def _milliseconds(seconds: Spread) -> Spread:
    return Spread(*(1000 * each for each in seconds))


def _text(spread: Spread | None) -> str:
    return "" if spread is None else spread.text()
