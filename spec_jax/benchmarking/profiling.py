"""Where the time of a round goes: records some rounds and divides their time among the parts."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from spec_jax import distributed
from spec_jax.benchmarking.parts import PARTS, Op, OpInfo, ProgramOps, describe
from spec_jax.benchmarking.traces import CONTAINERS, divide, read
from spec_jax.engine.batch import Batch
from spec_jax.engine.engine import Engine
from spec_jax.engine.requests import Request
from spec_jax.engine.scheduler import ROUNDS_PER_STEP
from spec_jax.errors import BenchmarkError

OTHER, HOST = "other", "host"
"""Ops outside all parts, and time without any op outside all parts."""
REGIONS = (*PARTS, OTHER, HOST)
COSTLY = 3
"""Ops of each region in JSON and tables."""

_RECORDED = "spec-jax profile"


class Cost(NamedTuple):
    """The wall time of one op, or of the host within a region.

    `name` is the op's in its program (HLO), or `host`; `kind` is its opcode, with the target of a
    custom call, and empty if the program is not known.
    """

    name: str
    kind: str
    seconds: float


class Region(NamedTuple):
    """A part of the recorded wall time, one of `REGIONS`, and its ops by decreasing cost."""

    name: str
    seconds: float
    costs: tuple[Cost, ...]


@dataclasses.dataclass(frozen=True)
class Profile:
    """A recording; times are wall times.

    Attributes:
      rounds: decoded rounds, fewer than requested if all texts ended.
      tokens: emitted by all rows, one per prompt.
      seconds: of the recording, which is the sum over the regions.
      seconds_unrecorded: of the same work just before, without the profiler.
      regions: in the order of `REGIONS`, empty ones included.
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
        """The same trace for Perfetto, which `jax.profiler` writes beside it."""
        return self.trace.with_name(self.trace.name.removesuffix(".xplane.pb") + ".trace.json.gz")

    def milliseconds_per_round(self, region: Region) -> float | None:
        """None for prefill, which is not part of a round, and without rounds."""
        if region.name == "prefill" or not self.rounds:
            return None
        return 1e3 * region.seconds / self.rounds

    def as_dict(self) -> dict[str, Any]:
        """For JSON: in milliseconds, with the most expensive ops of each region."""

        def shared(seconds: float) -> dict[str, float]:
            return {"milliseconds": 1e3 * seconds, "share": seconds / self.seconds}

        return {
            **{name: getattr(self, name) for name in ("rounds", "tokens", "rows")},
            "milliseconds": 1e3 * self.seconds,
            "milliseconds_unrecorded": 1e3 * self.seconds_unrecorded,
            "regions": [
                {
                    "region": region.name,
                    **shared(region.seconds),
                    "milliseconds_per_round": self.milliseconds_per_round(region),
                    "ops": [
                        {"name": name, "kind": kind, **shared(seconds)}
                        for name, kind, seconds in region.costs[:COSTLY]
                    ],
                }
                for region in self.regions
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
    """Decodes the same three times, to compile, to measure and to record, and reads the trace.

    All prompts are prefilled by one call and decoded as one batch.

    The engine is a fresh one, so that its programs are compiled with the names of the parts.
    `requests` makes the requests, equal ones at each call. Of several processes each writes into
    its folder in the directory.

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
    batch_requests = requests()
    with jax.profiler.trace(directory, profiler_options=options):
        batch = _decode(engine, batch_requests, rounds)
    on_progress("reading the trace")
    file = max(directory.glob("plugins/profile/*/*.xplane.pb"), default=None)
    if file is None:
        raise BenchmarkError(f"the profiler wrote no trace to {directory}; see its messages.")
    regions = regions_of(file, engine.compiler.texts())
    lengths = batch.view.lengths.tolist()[: len(batch_requests)]  # padding follows
    return Profile(
        rounds=int(batch.view.counters.rounds.max()),
        tokens=sum(lengths) - sum(len(each.prompt_token_ids) for each in batch_requests),
        rows=len(batch_requests),
        seconds=sum(each.seconds for each in regions),
        seconds_unrecorded=unrecorded,
        regions=regions,
        directory=directory,
        trace=file,
    )


@contextlib.contextmanager
def _named_programs() -> Iterator[None]:
    """Ignores programs of JAX's cache that were compiled from equal code with other names."""
    config: Any = jax.config
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(config, name)
    config.update(name, True)
    try:
        yield
    finally:
        config.update(name, before)


def _decode(engine: Engine, requests: Sequence[Request], rounds: int) -> Batch:
    """Prefills and decodes, in calls as long as in `LLM.generate`."""
    with jax.profiler.TraceAnnotation(_RECORDED):
        with jax.profiler.TraceAnnotation("prefill"):
            batch = engine.start(requests)
        while batch.running and rounds > 0:
            batch.advance(min(rounds, ROUNDS_PER_STEP))
            rounds -= ROUNDS_PER_STEP
    return batch


def regions_of(file: Path, texts: Sequence[str]) -> tuple[Region, ...]:
    """The recorded time by region, in the order of `REGIONS`.

    Within an annotation of the host that names a part, everything belongs to this part. Elsewhere
    an op belongs to the part whose named scope it was traced in. `file` is the `*.xplane.pb` that
    `profile` recorded, and `texts` are the programs that ran (HLO).

    Raises:
      BenchmarkError: the file does not hold the recording.
    """
    spans = read(file, (*PARTS, _RECORDED))
    recorded = next((each for each in spans if each.what == _RECORDED), None)
    if recorded is None:
        raise BenchmarkError(f"{file} lacks the recording; give --rounds a smaller number.")
    ops = {each.what for each in spans if isinstance(each.what, Op)}
    infos = describe(ops, [ProgramOps(text) for text in texts])
    shares = divide(
        [each for each in spans if each.what != _RECORDED],
        recorded.start,
        recorded.end,
        {op for op, info in infos.items() if info.kind in CONTAINERS},
    )
    costs: dict[str, list[Cost]] = {name: [] for name in REGIONS}
    for (part, op), nanoseconds in shares.items():
        info = OpInfo(HOST, "") if op is None else infos.get(op, OpInfo(None, ""))
        name = op.name if op else HOST
        costs[part or info.part or OTHER].append(Cost(name, info.kind, nanoseconds / 1e9))
    return tuple(
        Region(
            name,
            sum(each.seconds for each in members),
            tuple(sorted(members, key=lambda each: -each.seconds)),
        )
        for name, members in costs.items()
    )
