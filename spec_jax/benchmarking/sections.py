"""The sections of a report: figures and tables of what was measured."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from spec_jax.benchmarking.figures import Plot
from spec_jax.benchmarking.results import SPEC_JAX
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


@dataclasses.dataclass(frozen=True)
class Figure:
    """A plot and what is under it."""

    plot: Plot
    caption: str


@dataclasses.dataclass(frozen=True)
class Table:
    """A table; a folded one is shown when its caption is chosen."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False


@dataclasses.dataclass(frozen=True)
class Section:
    """Figures and tables under a title."""

    title: str
    text: str = ""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()


def sections_of(cells: Cells) -> list[Section]:
    """All that a file's measurements can show, in order; some are empty."""
    singles = {cell: each for cell, each in cells.items() if cell.batch_size == 1} or cells
    return [
        _table_1(singles),
        *_figure_1(singles),
        _optimum(singles),
        _against_an_oracle(singles),
        _by_temperature(cells),
        _by_batch_size(cells),
        _by_position(singles),
        _by_category(singles),
        _costs(cells),
        _all(cells),
    ]


def _table_1(cells: Cells) -> Section:
    rows = []
    for cell, measured in cells.items():
        for each in best_of_families(measured):
            rows.append(
                [
                    cell.name,
                    each.system.name,
                    _ms(each.seconds_per_token),
                    _ratio(each.speedup),
                    f"{each.tokens_per_call:.2f}",
                ]
            )
    head = ("domain", "system", "mean token time, ms", "speed-up", "tokens a target call")
    return Section(
        "Mean token time",
        "Of each method the fastest K, beside plain decoding. Times are of whole requests, prompts "
        "included: medians of the repeats, and ranges. The speed-up is the mean of tokens a "
        "second over that of the fastest plain decoding that was measured, as Spec-Bench has it; "
        "in batches, tokens a second are those of all rows together.",
        tables=[Table("After table 1 of arXiv 2302.01318", head, rows)],
    )


def _figure_1(cells: Cells) -> list[Section]:
    families: dict[str, dict[Cell, list[Measured]]] = defaultdict(lambda: defaultdict(list))
    for cell, measured in cells.items():
        plain = measured[0].plain
        for each in measured:
            if not each.system.is_plain:
                families[each.system.family][cell].append(each)
        for family in families.values():
            if cell in family and plain is not None and _library(family[cell]) == SPEC_JAX:
                family[cell].append(plain)
    panels: Sequence[tuple[str, str, Callable[[Measured], Spread | float | None]]] = (
        ("mean token time, ms", "Time", lambda each: _scaled(each.seconds_per_token)),
        ("speed-up", "Against the fastest plain decoding", lambda each: each.speedup),
        (
            "tokens a call / (K + 1)",
            "How much of a round is kept, the bonus token included",
            lambda each: each.tokens_per_call / (each.system.num_speculative_tokens + 1),
        ),
        ("loop time, ms", "A round", lambda each: _scaled(each.seconds_per_round)),
    )
    sections = []
    for family, by_cell in families.items():
        lookaheads = {
            each.system.num_speculative_tokens for several in by_cell.values() for each in several
        }
        if len(lookaheads) < 2:
            continue
        figures = []
        for label, caption, figure in panels:
            series = {
                cell.name: [
                    (each.system.num_speculative_tokens, value)
                    for each in several
                    if (value := figure(each)) is not None
                ]
                for cell, several in by_cell.items()
            }
            reference = 1.0 if label == "speed-up" else None
            figures.append(_figure(series, "K", label, caption, reference))
        sections.append(
            Section(
                f"By K: {family}",
                "After figure 1 of arXiv 2302.01318; K = 0 is plain decoding. Bars are the range "
                "of the repeats.",
                figures=figures,
            )
        )
    return sections


def _library(measured: Sequence[Measured]) -> str:
    return measured[0].system.library


def _optimum(cells: Cells) -> Section:
    rows = []
    for cell, measured in cells.items():
        for each in measured:
            predicted, efficiency = each.predicted_speedup, each.loop_efficiency
            if each.system.is_plain or predicted is None or efficiency is None:
                continue
            assert each.costs is not None
            k = each.system.num_speculative_tokens
            rows.append(
                [
                    cell.name,
                    each.system.name,
                    f"{each.tokens_per_call:.2f}",
                    f"{draft_cost(each.costs, each.system.method):.3f}",
                    f"{relative_cost(each.costs)[k + 1]:.2f}",
                    f"{predicted:.2f}",
                    efficiency.text(),
                    " + ".join(f"{1000 * part:.2f}" for part in each.round_seconds or ()),
                ]
            )
    head = (
        *("domain", "system", "E", "c", "v(K + 1)", "E / (K c + v)", "loop efficiency"),
        "a round, ms: draft + score + rest",
    )
    return Section(
        "Why this K",
        "E: tokens a target call. c: a draft step over a target call of one token. v(n): a call "
        "that scores n tokens over one that scores one. Loop efficiency is the measured speed-up "
        "of decoding, prompts apart and against our own plain decoding, over E / (K c + v(K + 1)). "
        "Of a round, draft and score are what those calls cost by themselves; the rest is what "
        "else the round took.",
        tables=[Table("Predicted by the cost of calls", head, rows)] if rows else [],
    )


def _against_an_oracle(cells: Cells) -> Section:
    figures = []
    for cell, measured in cells.items():
        families: dict[str, list[Measured]] = defaultdict(list)
        for each in measured:
            if not each.system.is_plain:
                families[each.system.family].append(each)
        for family, several in families.items():
            longest = max(several, key=lambda each: each.system.num_speculative_tokens)
            if (projected := projected_speedups(longest)) is None:
                continue
            found = [
                (each.system.num_speculative_tokens, each.decoding_speedup) for each in several
            ]
            series = {
                "the same K in every round": enumerate(projected.same),
                "oracle, at most K": enumerate(projected.oracle),
                "measured": [(k, speedup) for k, speedup in found if speedup is not None],
            }
            caption = f"{cell.name}, {family}"
            figures.append(_figure(series, "K", "speed-up of decoding", caption, reference=1.0))
    return Section(
        "What a better draft length could gain",
        "The oracle knows in advance how many tokens of a draft will be accepted, and drafts no "
        "more (arXiv 2405.04304, section 3). Both lines are projected from the acceptance by "
        "position of the largest K and from what calls cost: E / (K c + v(K + 1)), where the "
        "oracle pays n c + v(n + 1) for a round that accepts n. Prompts are not included.",
        figures=figures,
    )


def _by_temperature(cells: Cells) -> Section:
    groups: dict[tuple, dict[float, list[Measured]]] = defaultdict(dict)
    for cell, measured in cells.items():
        top_ps = {cell.setting.top_p}
        if not cell.setting.temperature:  # the same for every top-p
            top_ps = {other.setting.top_p for other in cells}
        for top_p in top_ps:
            key = (cell.prompts, cell.batch_size, top_p)
            groups[key][cell.setting.temperature] = measured
    figures = []
    for (prompts, batch, top_p), measured in groups.items():
        if len(measured) > 1:
            nucleus = f", top-p {top_p:g}" if top_p < 1 else ""
            caption = f"{prompts}{_batch(batch)}{nucleus}"
            figures.append(
                _figure(_families(measured), "temperature", "speed-up", caption, reference=1.0)
            )
    return Section("By temperature", "Of each method the fastest K.", figures=figures)


def _by_batch_size(cells: Cells) -> Section:
    groups: dict[tuple, dict[float, list[Measured]]] = defaultdict(dict)
    for cell, measured in cells.items():
        groups[cell.prompts, cell.setting.name][cell.batch_size] = measured
    figures = [
        _figure(_families(by_size), "batch size", "speed-up", f"{prompts}, {setting}", 1.0)
        for (prompts, setting), by_size in groups.items()
        if len(by_size) > 1
    ]
    text = "Of each method the fastest K, against plain decoding of the same batch size."
    return Section("By batch size", text, figures=figures)


def _families(measured: Mapping[float, list[Measured]]) -> dict[str, list[tuple[float, Spread]]]:
    """Family -> its fastest speed-up at each place; plain decoding is what it counts against."""
    series: dict[str, list[tuple[float, Spread]]] = defaultdict(list)
    for place, several in measured.items():
        for each in best_of_families(several):
            if each is not each.baseline and (speedup := each.speedup) is not None:
                series[each.system.family].append((place, speedup))
    return series


def _by_position(cells: Cells) -> Section:
    families: dict[str, dict[str, Measured]] = defaultdict(dict)
    for cell, measured in cells.items():
        for each in sorted(measured, key=lambda each: each.system.num_speculative_tokens):
            if each.acceptance_per_position:
                families[each.system.family][cell.name] = each  # the largest K stays
    figures = [
        _figure(
            {
                name: list(enumerate(each.acceptance_per_position, start=1))
                for name, each in by_cell.items()
            },
            "position in the draft",
            "rounds that keep it",
            f"{family}, K = {next(iter(by_cell.values())).system.num_speculative_tokens}",
        )
        for family, by_cell in families.items()
    ]
    return Section("Acceptance by position", "", figures=figures)


def _by_category(cells: Cells) -> Section:
    tables = []
    for cell, measured in cells.items():
        found, best = categories(measured), best_of_families(measured)
        if not found:
            continue
        rows = []
        for category in found:
            each_of = [each.of_category(category) for each in best]
            cells_of = [f"{_ratio(each.speedup)} / {each.tokens_per_call:.2f}" for each in each_of]
            rows.append([category, *cells_of])
        head = ["category", *(each.system.name for each in best)]
        tables.append(Table(f"{cell.name}: speed-up / tokens a target call", head, rows))
    return Section("By category", "Of each method the K that is fastest over all.", tables=tables)


def _costs(cells: Cells) -> Section:
    measured = {each.cell.batch_size: each.costs for several in cells.values() for each in several}
    figures, rows = [], []
    for batch, costs in measured.items():
        if costs is None:
            continue
        v, name = relative_cost(costs), f"batch {batch}"
        if len(v) > 1:
            series = {name: list(v.items())}
            figures.append(_figure(series, "tokens scored", "v(n)", f"A target call, {name}", 1.0))
        target = next(s for s in costs.steps if (s.name, s.width) == ("target", 1))
        step = Spread.of(target.seconds)
        rate = costs.weight_bytes / step.median
        share = "" if not costs.streaming else f"{rate / costs.streaming:.2f}"
        drafts = {s.name: draft_cost(costs, s.name) for s in costs.steps if s.name != "target"}
        rows.append(
            [
                name,
                _ms(step),
                ", ".join(f"{method} {c:.3f}" for method, c in drafts.items()),
                f"{rate / 1e9:.1f}",
                share,
            ]
        )
    head = ("rows", "target call, ms", "c", "weights, GB/s", "of streaming")
    tables = [Table("Calls by themselves, in a loop on the device", head, rows)] if rows else []
    return Section("What calls cost", "", figures=figures, tables=tables)


def _all(cells: Cells) -> Section:
    head = (
        *("system", "tokens/s", "speed-up", "tokens a call", "accepted"),
        *("first token P50, ms", "P90", "P99", "token P50, ms", "P90", "P99"),
    )
    tables = []
    for cell, measured in cells.items():
        rows = []
        for each in measured:
            rate = each.acceptance_rate
            first, later = each.first_token_seconds, each.seconds_per_output_token
            rows.append(
                [
                    each.system.name,
                    each.tokens_per_second.text(1),
                    _ratio(each.speedup),
                    f"{each.tokens_per_call:.2f}",
                    "" if rate is None else f"{rate:.3f}",
                    *(f"{1000 * value:.1f}" for value in (*first, *later)),
                ]
            )
        tables.append(Table(cell.name, head, rows, folded=True))
    text = "Percentiles are over the requests of all repeats, and of tokens after the first."
    return Section("All systems", text, tables=tables)


def _figure(
    series: Mapping[str, Iterable[tuple[float, Any]]],
    x: str,
    y: str,
    caption: str,
    reference: float | None = None,
) -> Figure:
    points = {label: list(each) for label, each in series.items()}
    return Figure(Plot(points, x, y, reference), caption)


def _scaled(spread: Spread) -> Spread:
    """In milliseconds."""
    return Spread(*(1000 * each for each in spread))


def _ms(spread: Spread) -> str:
    return _scaled(spread).text()


def _ratio(spread: Spread | None) -> str:
    return "" if spread is None else spread.text()


def _batch(size: int) -> str:
    return f", batch {size}" if size > 1 else ""
