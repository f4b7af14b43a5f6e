"""`spec-jax plan`: what a target and its draft will take on a layout."""

import dataclasses
from typing import Any

import jax
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from spec_jax.checkpoints.recipe import Published
from spec_jax.checkpoints.shape import read_shape
from spec_jax.cli.devices import prepare_to_compile_for
from spec_jax.cli.plan_search import report_search, write_best
from spec_jax.cli.screen import Screen, plain_table, visible
from spec_jax.cli.tool_options import PLAN_LOOKAHEAD, PlanOptions
from spec_jax.models.sizes import parameter_count
from spec_jax.planning import (
    LOOKAHEADS,
    CallPlan,
    CompiledProgram,
    Plan,
    derived_draft,
    make_plan,
    search,
)
from spec_jax.sharding import Layout

ONE_DEVICE = dataclasses.replace(Layout.tensor_parallel(1), name="one device")
_MEMORY = {
    "weights, GiB": "weight_bytes",
    "weights in host memory, GiB": "host_bytes",
    "caches, GiB": "cache_bytes",
    "temporaries, estimated, GiB": "temporary_bytes",
    "memory, computed, GiB": "computed_bytes",
}
_TERMS = {
    "reading weights, ms": "weights",
    "reading caches, ms": "cache",
    "arithmetic meanwhile, ms": "compute",
    "collectives, hops, ms": "latency",
    "collectives, bytes, ms": "transfer",
    "host memory meanwhile, ms": "stream",
}
"""Label of a row -> the figure of a call."""


def run(options: PlanOptions, screen: Screen) -> int:
    """Makes the plan and prints it; returns the exit code."""
    layout = Layout.read(options.layout) if options.layout else ONE_DEVICE
    if options.compile:
        prepare_to_compile_for(layout)
    else:
        jax.config.update("jax_platforms", "cpu")
    target = read_shape(options.target, on_progress=screen.progress)
    draft = read_shape(options.draft, on_progress=screen.progress) if options.draft else None
    if draft is None and options.method == "draft_model":
        draft = derived_draft(target, layout)
    drafting: dict[str, Any] = {
        "method": options.method,
        "early_exit_layers": options.early_exit_layers,
    }
    if options.search:
        results = search(
            target,
            draft,
            layout,
            **drafting,
            acceptance=options.acceptance,
            batches=options.batch,
            contexts=options.context,
            lookaheads=options.num_speculative_tokens or LOOKAHEADS,
            quantizations=options.quantization,
            sampling=options.sampling,
            dtype=options.dtype,
        )
        written = [write_best(results, options.out)] if options.out else []
        lines, record = [*report_search(results), *written], results.as_dict()
    else:
        plan = make_plan(
            target,
            draft,
            layout,
            **drafting,
            num_speculative_tokens=(*options.num_speculative_tokens, PLAN_LOOKAHEAD)[0],
            acceptance=options.acceptance,
            batch=(*options.batch, 1)[0],
            context=options.context[0] if options.context else None,
            sampling=options.sampling,
            dtype=options.dtype,
            quantization=options.quantization[0],
            offload=options.offload,
            resident_layers=options.resident_layers,
            compile=options.compile,
            on_progress=screen.progress,
        )
        lines, record = _report(plan), plan.as_dict()
    if options.json:
        screen.record(record)
    else:
        screen.show(*lines)
    return 0


def _report(plan: Plan) -> list[RenderableType]:
    """The plan for people."""
    chip = f" of {plan.layout.chip.name}" if plan.layout.chip else ""
    weights = "" if plan.quantization == "none" else f" and {plan.quantization}"
    offloaded = ""
    if plan.offload == "host":
        away = plan.target.config.num_layers - plan.resident_layers
        offloaded = f", {away} layers in host memory"
    where = plan.layout.name
    if plan.layout is not ONE_DEVICE:
        where += f": {plan.layout.size} device{'s' if plan.layout.size > 1 else ''}{chip}"
    heading = (
        f"{plan.title} on {where}, "
        f"{plan.dtype}{weights}{offloaded}, batch {plan.batch}, "
        f"{plan.capacity} KV slots a row"
    )
    if plan.method != "none":
        heading += f", K = {plan.num_speculative_tokens}"
    sizes = [
        f"{shape.name}: {parameter_count(shape.config):,} parameters"
        for shape in (plan.target, plan.draft)
        if shape is not None
    ]
    note = "Figures are for one device."
    return [Text(visible(heading), "bold"), *sizes, note, "", _table(plan), "", *_in_words(plan)]


def _table(plan: Plan) -> Table:
    """A column for each call and for the prefill, a row for each figure that one of them has."""
    names, calls = [*plan.calls], [*plan.calls.values()]
    parts = [*calls, plan.prefill]
    programs = [part.program for part in parts]
    compiled = [program.as_dict() if program else {} for program in programs]
    published = {id(call): f"{each.ms_per_token:g}" for _, each, call in plan.published}
    rows: dict[str, list[str]] = {}
    for label, name in _MEMORY.items():
        counts = [getattr(part, name, None) for part in parts]
        counts[names.index("sampling")] = None  # it holds nothing
        rows[label] = [_gib(count) for count in counts] if any(counts) else []
    rows["memory, compiled, GiB"] = [_compiled(program) for program in programs]
    rows["  of it temporary, GiB"] = [
        _gib(program.temporary_bytes) if program else "" for program in programs
    ]
    for kind in dict.fromkeys(("all-reduce", *plan.round.collectives)):
        rows[f"{kind}s, computed"] = [str(call.collectives.get(kind, 0)) for call in calls]
    rows["  bytes exchanged, KiB"] = [f"{call.collective_bytes / 2**10:.0f}" for call in calls]
    for kind in sorted({kind for each in compiled for kind in each.get("collectives", ())}):
        rows[f"{kind}, compiled"] = [_range(each, kind) for each in compiled]
    if plan.round.terms is not None:
        for label, name in _TERMS.items():
            if name != "stream" or plan.offload == "host":
                rows[label] = [_ms(getattr(call.terms, name)) for call in calls]
        rows["projection, ms"] = [_ms(part.seconds) for part in parts]
        rows["published, ms"] = [published.get(id(call), "") for call in calls]
    headings = [name.replace("_", "\n") for name in (*names, "prefill")]
    headings[names.index("scoring")] += f"\n{plan.num_speculative_tokens + 1}"
    lines = ((label, *cells) for label, cells in rows.items() if any(cells))
    table = plain_table([""], headings, lines, padding=1)
    table.columns[0].style = "dim"
    return table


def _compiled(program: CompiledProgram | None) -> str:
    if program is None:
        return ""
    return "too much" if program.memory_bytes is None else _gib(program.memory_bytes)


def _range(program: dict[str, dict[str, int]], kind: str) -> str:
    """How often a collective runs: a range if conditionals decide."""
    highest = program.get("collectives", {}).get(kind)
    if highest is None:
        return ""
    lowest = program["least_collectives"].get(kind, 0)
    return str(highest) if lowest == highest else f"{lowest} - {highest}"


def _in_words(plan: Plan) -> list[str]:
    """What the table means."""
    lines = []
    chip, memory, prefill = plan.layout.chip, plan.memory_bytes, plan.prefill
    if plan.fits is not None and chip is not None:
        verdict = "fits" if plan.fits else "does not fit"
        taken = "more than" if memory is None else f"{_gib(memory)} of"
        source = "by the compiler" if prefill.program else "by an estimate, see --compile"
        lines.append(
            f"It {verdict}: the larger of round and prefill takes {taken} {_gib(chip.usable)} GiB "
            f"({source})."
        )
    if joining := prefill.joining_bytes:
        lines.append(f"Rows that join while others decode take {_gib(joining)} GiB beside that.")
    for name, program in {"round": plan.round.program, "prefill": prefill.program}.items():
        if program and program.refusal:
            lines.append(f"The compiler refuses the {name}: {program.refusal}")
    if plan.seconds_to_first_token is not None:
        lines.append(
            f"Projection: {plan.seconds_to_first_token:.2f} s to the first token of prompts that "
            f"fill the context, read {prefill.block} tokens at a time."
        )
    rounds = f"{plan.tokens_per_round:.2f} tokens a round if {plan.acceptance:g} are accepted"
    if plan.method == "none":
        rounds = "One token a round"
    if plan.speedup is not None and plan.best is not None:
        best, best_speedup = plan.best
        lines.append(
            f"Projection: {rounds}, {plan.speedup:.2f} times as fast as plain decoding; "
            f"best at K = {best}: {best_speedup:.2f} times."
        )
    if plan.round.seconds is not None:
        lines.append(
            "A projection is the least time that memory, arithmetic and links take; software "
            "overhead is left out, and of sampling all but its exchanges."
        )
    else:
        why = "the layout has no figures of its chip"
        if chip is not None:
            why = "on GPUs it is not known how fast quantized matrices are read"
        lines.append(f"{rounds}. No time is projected: {why}.")
    lines += [_compared(*each) for each in plan.published]
    for role in ("target", "draft"):
        replicated = [each for each in plan.replicated if each.role == role]
        if replicated:
            axes = ", ".join(
                f"{each.axis} ({each.size}: "
                f"{each.num_shards if each.num_shards > 1 else 'replicated'} instead of "
                f"{each.requested} shards)"
                for each in replicated
            )
            lines.append(f"Not divisible as the layout asks, of the {role}: {axes}.")
    if plan.compile_seconds is not None:
        if plan.method == "prompt_lookup":
            lines.append("Compiled collectives count each width that a round may score.")
        lines.append(f"Compiled in {plan.compile_seconds:.1f} s.")
    return lines


def _compared(role: str, published: Published, section: CallPlan) -> str:
    """What would explain the difference if a single term caused all of it."""
    measured, terms = published.ms_per_token / 1000, section.terms
    line = f"Published for the {role}: {published.ms_per_token:g} ms ({published.source})"
    count = sum(section.collectives.values())
    if terms is None or measured <= terms.total or not count:
        return line + "."
    exchanges = terms.latency + terms.transfer
    missing = measured - terms.total
    share = (terms.weights + terms.cache) / (measured - exchanges)
    return (
        f"{line}, {_ms(missing)} ms more than projected. It would take memory read at "
        f"{100 * share:.0f} % of its bandwidth, or collectives of "
        f"{1e6 * (exchanges + missing) / count:.0f} us instead of "
        f"{1e6 * exchanges / count:.0f}, or {1e6 * missing / count:.0f} us of software around each."
    )


def _gib(count: float | None) -> str:
    return "" if count is None else f"{count / 2**30:.2f}"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:.3f}"
