"""`spec-jax plan`: what a target and its draft will take on a layout."""

from collections.abc import Callable

import jax
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from spec_jax.checkpoints.recipe import Published
from spec_jax.checkpoints.shape import Shape, read_shape
from spec_jax.cli.devices import prepare_to_compile_for
from spec_jax.cli.plan_search import report_search, write_best
from spec_jax.cli.screen import Screen, visible
from spec_jax.cli.tool_options import PLAN_LOOKAHEAD, PlanOptions
from spec_jax.models.sizes import parameter_count
from spec_jax.planning import (
    LOOKAHEADS,
    CallPlan,
    CompiledProgram,
    Plan,
    Replicated,
    derived_draft,
    make_plan,
    search,
)
from spec_jax.sharding import Layout


def run(options: PlanOptions) -> int:
    """Makes the plan and prints it; returns the exit code."""
    layout = Layout.read(options.layout)
    if options.compile:
        prepare_to_compile_for(layout)
    else:
        jax.config.update("jax_platforms", "cpu")
    with Screen(json_lines=options.json) as screen:
        target = read_shape(options.target, on_progress=screen.progress)
        draft = options.draft and read_shape(options.draft, on_progress=screen.progress)
        draft = draft or derived_draft(target, layout)
        if options.search:
            _search(target, draft, layout, options, screen)
            return 0
        plan = make_plan(
            target,
            draft,
            layout,
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
        if options.json:
            screen.record(plan.as_dict())
        else:
            screen.show(*_report(plan))
    return 0


def _search(
    target: Shape, draft: Shape, layout: Layout, options: PlanOptions, screen: Screen
) -> None:
    results = search(
        target,
        draft,
        layout,
        acceptance=options.acceptance,
        batches=options.batch,
        contexts=options.context,
        lookaheads=options.num_speculative_tokens or LOOKAHEADS,
        quantizations=options.quantization,
        sampling=options.sampling,
        dtype=options.dtype,
    )
    written = write_best(results, options.out) if options.out else ""
    if options.json:
        screen.record(results.as_dict())
        return
    screen.show(*report_search(results), *([written] if written else []))


def _report(plan: Plan) -> list[RenderableType]:
    """The plan for people."""
    chip = f" of {plan.layout.chip.name}" if plan.layout.chip else ""
    weights = "" if plan.quantization == "none" else f" and {plan.quantization}"
    offloaded = ""
    if plan.offload == "host":
        away = plan.target.config.num_layers - plan.resident_layers
        offloaded = f", {away} layers in host memory"
    heading = (
        f"{plan.target.name} with {plan.draft.name} on {plan.layout.name}: "
        f"{plan.layout.size} devices{chip}, {plan.dtype}{weights}{offloaded}, batch {plan.batch}, "
        f"{plan.capacity} KV slots a row, K = {plan.num_speculative_tokens}"
    )
    sizes = [
        f"{shape.name}: {parameter_count(shape.config):,} parameters"
        for shape in (plan.target, plan.draft)
    ]
    note = "Figures are for one device."
    return [Text(visible(heading), "bold"), *sizes, note, "", _sections(plan), "", *_verdicts(plan)]


def _sections(plan: Plan) -> Table:
    sections = {
        "target call": plan.target_call,
        f"scoring {plan.num_speculative_tokens + 1}": plan.scoring,
        "draft step": plan.draft_step,
        "sampling": plan.sampling,
        "round": plan.round,
    }
    programs = [section.program for section in (*sections.values(), plan.prefill)]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", style="dim")  # may wrap, for the sake of the numbers
    for name in [*sections, "prefill"]:
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)

    def row(label: str, of: Callable[[CallPlan], str], prefill: str = "") -> None:
        cells = [of(section) for section in sections.values()]
        if any(cells):
            table.add_row(label, *cells, prefill)

    def compiled_row(label: str, of: Callable[[CompiledProgram], str]) -> None:
        cells = [of(program) if program else "" for program in programs]
        if any(cells):
            table.add_row(label, *cells)

    def memory(label: str, of: Callable[[CallPlan], int], prefill: str = "") -> None:
        row(label, lambda s: _gib(of(s)) if s.weight_bytes else "", prefill)

    memory("weights, GiB", lambda s: s.weight_bytes)
    if plan.offload == "host":
        memory("weights in host memory, GiB", lambda s: s.host_bytes)
    memory("caches, GiB", lambda s: s.cache_bytes)
    held, temporary = plan.prefill.held_bytes, plan.prefill.temporary_bytes
    row(
        "temporaries, estimated, GiB",
        lambda s: _gib(s.temporary_bytes) if s.temporary_bytes else "",
        _gib(temporary),
    )
    memory(
        "memory, computed, GiB",
        lambda s: s.computed_bytes,
        _gib(held + temporary),
    )
    compiled_row("memory, compiled, GiB", _compiled_memory)
    compiled_row("  of it temporary, GiB", lambda program: _gib(program.temporary_bytes))
    for kind in dict.fromkeys(("all-reduce", *plan.round.collectives)):
        row(f"{kind}s, computed", lambda s, kind=kind: str(s.collectives.get(kind, 0)))
    row("  bytes exchanged, KiB", lambda s: f"{s.collective_bytes / 2**10:.0f}")
    for kind in sorted({kind for program in programs if program for kind in _collectives(program)}):
        compiled_row(
            f"{kind}, compiled", lambda program, kind=kind: _collectives(program).get(kind, "")
        )
    if plan.round.terms is None:
        return table
    table.add_section()
    for name, label in _TERMS.items():
        if name != "stream" or plan.offload == "host":
            row(label, lambda s, name=name: _ms(getattr(s.terms, name)))
    row("projection, ms", lambda s: _ms(s.seconds), _ms(plan.prefill.seconds))
    published = {id(section): each for _, each, section in plan.published}

    def measured(section: CallPlan) -> str:
        each = published.get(id(section))
        return f"{each.ms_per_token:g}" if each else ""

    row("published, ms", measured)
    return table


_TERMS = {
    "weights": "reading weights, ms",
    "cache": "reading caches, ms",
    "compute": "arithmetic meanwhile, ms",
    "latency": "collectives, hops, ms",
    "transfer": "collectives, bytes, ms",
    "stream": "host memory meanwhile, ms",
}


def _verdicts(plan: Plan) -> list[str]:
    """What the table means."""
    lines = []
    chip, memory, prefill = plan.layout.chip, plan.memory_bytes, plan.prefill
    if plan.fits is not None and chip is not None:
        verdict = "fits" if plan.fits else "does not fit"
        taken = "more than" if memory is None else f"{_gib(memory)} of"
        source = "by the compiler" if prefill.program else "by an estimate, see --compile"
        lines.append(
            f"It {verdict}: the larger of round and prefill takes {taken} {_gib(chip.memory)} GiB "
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
    if plan.speedup is not None and plan.best is not None:
        best, most = plan.best
        lines.append(
            f"Projection: {rounds}, {plan.speedup:.2f} times as fast as plain decoding; "
            f"best at K = {best}: {most:.2f} times."
        )
        lines.append(
            "A projection is the least time that memory, arithmetic and links take; software "
            "overhead is left out, and of sampling all but its exchanges."
        )
    else:
        lines.append(f"{rounds}. The layout has no figures of its chip: no time is projected.")
    lines += [_compared(*each) for each in plan.published]
    for role in ("target", "draft"):
        replicated = [each for each in plan.replicated if each.role == role]
        if replicated:
            axes = ", ".join(f"{each.axis} ({each.size}: {_shards(each)})" for each in replicated)
            lines.append(f"Not divisible as the layout asks, of the {role}: {axes}.")
    if plan.compile_seconds is not None:
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


def _shards(each: Replicated) -> str:
    shards = str(each.num_shards) if each.num_shards > 1 else "replicated"
    return f"{shards} instead of {each.requested} shards"


def _compiled_memory(program: CompiledProgram) -> str:
    return "too much" if program.memory_bytes is None else _gib(program.memory_bytes)


def _collectives(program: CompiledProgram) -> dict[str, str]:
    """Kind -> count in the compiled program: `least - most` if conditionals decide."""
    compiled = program.as_dict()
    least, most = compiled["least_collectives"], compiled["collectives"]
    return {
        kind: str(most[kind])
        if least.get(kind, 0) == most[kind]
        else f"{least.get(kind, 0)} - {most[kind]}"
        for kind in most
    }


def _gib(count: int | float) -> str:
    return f"{count / 2**30:.2f}"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:.3f}"
