"""Reads traces that `jax.profiler` recorded, and divides wall time among the ops in them.

An op lasts from its start to its end on the trace's clock, however many threads work on it. Every
moment counts once: for the op that runs, in equal parts for ops that run at once, and for a loop, a
branch or a call only while nothing that it runs does. So the times of all ops, and the time without
any, add up to the wall time, on a CPU as on accelerators.
"""

import bisect
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax.profiler import ProfileData

from spec_jax.benchmarking.parts import Op

CONTAINERS = ("while", "conditional", "call")
"""Kinds of ops that run other ops, for which a trace has separate events."""

_OPS, _MODULES = "XLA Ops", "XLA Modules"
_END = "end: "
_TEXT = re.compile(r"%?([\w.-]+)(?: = |$)")
_NUMBERED = re.compile(r"(.*)\((\d+)\)$")


class Span(NamedTuple):
    """An op, or an annotation of the host by its name, in nanoseconds on the trace's clock.

    Attributes:
      line: which thread of the host or queue of a device began it.
      noted: when, and on which thread, an event of its end was recorded, if there is one. A CPU's
        op may go on after `end`, but not after this.
    """

    start: float
    end: float
    what: Op | str
    line: str = ""
    noted: tuple[float, str] | None = None


def read(file: Path, annotations: Collection[str]) -> list[Span]:
    """The ops in a trace (`*.xplane.pb`), and the host's annotations of the given names."""
    spans: list[Span] = []
    for plane in ProfileData.from_file(str(file)).planes:
        lines = [(line.name, list(line.events)) for line in plane.lines]
        runs = [event for name, events in lines if name == _MODULES for event in events]
        runs.sort(key=_start)
        if any(name == _OPS for name, _ in lines):
            # The plane of an accelerator whose other lines show the same time again.
            lines = [(name, events) for name, events in lines if name == _OPS]
        ends = {
            event_id: (event.end_ns, f"{plane.name} {number}")
            for number, (_, events) in enumerate(lines)
            for event in events
            if event.name.startswith(_END) and (event_id := dict(event.stats).get("_c"))
        }
        for number, (name, events) in enumerate(lines):
            for event in events:
                line = f"{plane.name} {number}"
                if event.name in annotations:
                    spans.append(Span(event.start_ns, event.end_ns, event.name, line))
                elif not event.name.startswith(_END):
                    stats = dict(event.stats)
                    if op := _op(event, stats, runs if name == _OPS else ()):
                        noted = ends.get(stats.get("_p"))
                        spans.append(Span(event.start_ns, event.end_ns, op, line, noted))
    return spans


def _op(event: Any, stats: dict[str, Any], runs: Sequence[Any]) -> Op | None:
    """The op of an event, or None; `runs` are the runs of programs on its device, in order."""
    name, module, program = (stats.get(key) for key in ("hlo_op", "hlo_module", "program_id"))
    if name is None and not runs:
        return None
    if module is None:
        at = bisect.bisect_right(runs, event.start_ns, key=_start) - 1
        run = _NUMBERED.match(runs[at].name) if at >= 0 else None
        module, program = run.groups() if run else ("", 0)
    match = _TEXT.match(name or event.name)  # a TPU's event may have an op's whole text as its name
    return Op(str(module), int(program or 0), match[1] if match else event.name)


def _start(event: Any) -> float:
    return event.start_ns


def divide(
    spans: Sequence[Span], begin: float, end: float, containers: Collection[Op]
) -> dict[tuple[str | None, Op | None], float]:
    """Nanoseconds of wall time by annotation and op; None where there was none.

    Annotations of one name or another do not overlap. `containers` run other ops; so does an op
    while a later one of its line is open.
    """
    shares: dict[tuple[str | None, Op | None], float] = defaultdict(float)
    annotation: str | None = None
    running: dict[int, Span] = {}
    before = begin
    spans = _with_their_ends(spans, containers)
    for now, index, starts in _changes(spans, begin, end):
        if now > before:
            working = _working(running.values(), containers)
            for what in working or (None,):
                shares[annotation, what] += (now - before) / max(1, len(working))
            before = now
        what = spans[index].what if index >= 0 else None
        if isinstance(what, str):
            annotation = what if starts else None
        elif starts:
            running[index] = spans[index]
        else:
            running.pop(index, None)
    return shares


def _with_their_ends(spans: Sequence[Span], containers: Collection[Op]) -> list[Span]:
    """The spans until the events of their ends.

    A thread that ends an op may run all that follows before it records the event. So an op that
    runs no others has ended when that thread starts the next one.
    """
    starts: dict[str, list[float]] = defaultdict(list)
    for each in sorted(spans, key=lambda span: span.start):
        if isinstance(each.what, Op):
            starts[each.line].append(each.start)
    ended: list[Span] = []
    for each in spans:
        if each.noted is not None:
            end, thread = each.noted
            following = bisect.bisect_right(starts[thread], each.start)
            if each.what not in containers and following < len(starts[thread]):
                end = min(end, starts[thread][following])
            each = each._replace(end=max(each.end, end))
        ended.append(each)
    return ended


def _changes(spans: Sequence[Span], begin: float, end: float) -> Iterator[tuple[float, int, bool]]:
    """When spans start and end, in order: the time, the span's number, and whether it starts."""
    inside = [i for i, each in enumerate(spans) if each.start < end and each.end > begin]
    changes = [
        # What ends goes before what starts, and of what starts at once the longest goes first.
        *((max(spans[i].start, begin), 1, -spans[i].end, i) for i in inside),
        *((min(spans[i].end, end), 0, 0.0, i) for i in inside if spans[i].end > spans[i].start),
        (end, 2, 0.0, -1),
    ]
    for now, starts, _, index in sorted(changes):
        yield now, index, starts == 1


def _working(running: Collection[Span], containers: Collection[Op]) -> list[Op]:
    """The open ops that work, in the order of their starts."""
    open_ops = {each.line: each.what for each in running if isinstance(each.what, Op)}
    leaves = [op for op in open_ops.values() if op not in containers]
    return leaves or [each.what for each in running if isinstance(each.what, Op)][-1:]
