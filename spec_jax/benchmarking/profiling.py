"""Where the time of a round goes: records some rounds, and divides their time among its parts."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from spec_jax import distributed
from spec_jax.benchmarking.parts import PARTS, Known, Op, Program, describe
from spec_jax.benchmarking.traces import CONTAINERS, divide, read
from spec_jax.engine.batch import Batch
from spec_jax.engine.engine import Engine
from spec_jax.engine.requests import Request
from spec_jax.engine.scheduler import ROUNDS_PER_CALL
from spec_jax.errors import BenchmarkError

OTHER, HOST = "other", "host"
"""Ops of none of the parts, and time without any op outside of the parts."""
REGIONS = (*PARTS, OTHER, HOST)
COSTLY = 3
"""Ops of each region that are named."""

_RECORDED = "spec-jax profile"


@dataclasses.dataclass(frozen=True)
class Cost:
    """The time that one op took, or the host within a region.

    Attributes:
      name: of the op in its program (HLO), or `host`.
      kind: its opcode, with the target of a custom call; empty if the program is not known.
      seconds: wall time.
    """

    name: str
    kind: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Region:
    """A part of the recorded time.

    Attributes:
      name: one of `REGIONS`.
      seconds: wall time.
      costs: of its ops, the most expensive first.
    """

    name: str
    seconds: float
    costs: tuple[Cost, ...]


@dataclasses.dataclass(frozen=True)
class Profile:
    """What was recorded; times are wall times.

    Attributes:
      rounds: that were decoded, fewer than asked if all texts ended.
      tokens: that they gave, of all rows.
      rows: of the batch, one a prompt.
      seconds: of the recording, which is the sum over the regions.
      seconds_unrecorded: of the same work just before, without the profiler.
      regions: in the order of `REGIONS`; those without any time too.
      directory: where the trace was written, for XProf and TensorBoard.
      trace: the file in it that was read.
    """

    rounds: int
    tokens: int
    rows: int
    seconds: float
    seconds_unrecorded: float
    regions: tuple[Region, ...]
    directory: Path
    trace: Path

    @property
    def viewable(self) -> Path:
        """The same trace as Perfetto reads it, which `jax.profiler` writes beside it."""
        return self.trace.with_name(self.trace.name.removesuffix(".xplane.pb") + ".trace.json.gz")

    def milliseconds_per_round(self, region: Region) -> float | None:
        """None of prefill, which is no part of rounds, and if there were none."""
        if region.name == "prefill" or not self.rounds:
            return None
        return 1e3 * region.seconds / self.rounds

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the same in milliseconds, with the most expensive ops of each region."""
        return {
            "rounds": self.rounds,
            "tokens": self.tokens,
            "rows": self.rows,
            "milliseconds": 1e3 * self.seconds,
            "milliseconds_unrecorded": 1e3 * self.seconds_unrecorded,
            "regions": [
                {
                    "region": each.name,
                    "milliseconds": 1e3 * each.seconds,
                    "milliseconds_per_round": self.milliseconds_per_round(each),
                    "share": each.seconds / self.seconds,
                    "ops": [
                        {
                            "name": cost.name,
                            "kind": cost.kind,
                            "milliseconds": 1e3 * cost.seconds,
                            "share": cost.seconds / self.seconds,
                        }
                        for cost in each.costs[:COSTLY]
                    ],
                }
                for each in self.regions
            ],
            "trace": str(self.trace),
        }


def profile(
    engine: Engine,
    requests: Callable[[], Sequence[Request]],
    directory: Path,
    rounds: int,
    on_progress: Callable[[str], None] = lambda message: None,
) -> Profile:
    """Decodes the same three times, to compile, to measure and to record, and reads the record.

    All prompts are read by one call and decoded as one batch.

    Args:
      engine: what decodes; fresh, so that its programs are compiled with the names of the parts.
      requests: makes the requests, equal ones at each call.
      directory: where `jax.profiler` writes; each of several processes takes a folder in it.
      rounds: most rounds.
      on_progress: called with a line of text before each step.

    Raises:
      BenchmarkError: the profiler wrote nothing that can be read.
    """
    with _named_programs():
        on_progress("warming up")
        _decode(engine, requests(), rounds)
    on_progress("measuring without the profiler")
    begin = time.perf_counter()
    _decode(engine, requests(), rounds)
    unrecorded = time.perf_counter() - begin
    on_progress("recording")
    number, count = distributed.process()
    if count > 1:  # several on one host would write the same file
        directory = directory / f"process-{number}"
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's calls would take most of the time
    asked = requests()
    with jax.profiler.trace(directory, profiler_options=options):
        batch = _decode(engine, asked, rounds)
    on_progress("reading the trace")
    file = max(directory.glob("plugins/profile/*/*.xplane.pb"), default=None)
    if file is None:
        raise BenchmarkError(f"the profiler wrote no trace to {directory}; see its messages.")
    regions = regions_of(file, engine.compiler.texts())
    lengths = batch.view.lengths.tolist()
    return Profile(
        rounds=int(batch.view.counters.rounds.max()),
        tokens=sum(
            length - len(request.prompt_token_ids)
            for length, request in zip(lengths, asked, strict=False)  # padding follows
        ),
        rows=len(asked),
        seconds=sum(each.seconds for each in regions),
        seconds_unrecorded=unrecorded,
        regions=regions,
        directory=directory,
        trace=file,
    )


@contextlib.contextmanager
def _named_programs() -> Iterator[None]:
    """Takes no program from JAX's cache that was compiled from like code with other names in it."""
    config: Any = jax.config
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(config, name)
    config.update(name, True)
    try:
        yield
    finally:
        config.update(name, before)


def _decode(engine: Engine, requests: Sequence[Request], rounds: int) -> Batch:
    """Reads the prompts and decodes, in calls as long as `LLM.generate` makes them."""
    with jax.profiler.TraceAnnotation(_RECORDED):
        with jax.profiler.TraceAnnotation("prefill"):
            batch = engine.start(requests)
        while batch.running and rounds > 0:
            batch.advance(min(rounds, ROUNDS_PER_CALL))
            rounds -= ROUNDS_PER_CALL
    return batch


def regions_of(file: Path, texts: Sequence[str]) -> tuple[Region, ...]:
    """The recorded time by region, in the order of `REGIONS`.

    Within an annotation of the host that names a part, everything is of this part. Elsewhere an op
    is of the part whose named scope it was traced in.

    Args:
      file: `*.xplane.pb`, recorded by `profile`.
      texts: of the programs that ran (HLO).

    Raises:
      BenchmarkError: the file does not hold the recording.
    """
    spans = read(file, (*PARTS, _RECORDED))
    recorded = next((each for each in spans if each.what == _RECORDED), None)
    if recorded is None:
        raise BenchmarkError(f"{file} lacks the recording; give --rounds a smaller number.")
    ops = {each.what for each in spans if isinstance(each.what, Op)}
    known = describe(ops, [Program(text) for text in texts])
    shares = divide(
        [each for each in spans if each.what != _RECORDED],
        recorded.start,
        recorded.end,
        {op for op, each in known.items() if each.kind in CONTAINERS},
    )
    costs: dict[str, list[Cost]] = {name: [] for name in REGIONS}
    for (part, op), nanoseconds in shares.items():
        if op is None:
            costs[part or HOST].append(Cost(HOST, "", nanoseconds / 1e9))
        else:
            told = known.get(op, Known(None, ""))
            costs[part or told.part or OTHER].append(Cost(op.name, told.kind, nanoseconds / 1e9))
    return tuple(
        Region(
            name,
            sum(each.seconds for each in own),
            tuple(sorted(own, key=lambda each: -each.seconds)),
        )
        for name, own in costs.items()
    )
