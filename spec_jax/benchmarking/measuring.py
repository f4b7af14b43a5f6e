"""Measures systems in turns within each repeat: a machine that drifts does so for all of them."""

import contextlib
import datetime
import hashlib
import importlib.metadata
import itertools
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from spec_jax import distributed
from spec_jax.benchmarking.costs import measure_costs
from spec_jax.benchmarking.prompts import PromptSet
from spec_jax.benchmarking.results import Costs, Header, PromptsOf, Run, Setting, Writer
from spec_jax.benchmarking.systems import Ours, Runner, Task, one_of_each
from spec_jax.errors import BenchmarkError
from spec_jax.kernels import native
from spec_jax.llm import LLM

PACKAGES = ("spec-jax", "jax", "jaxlib", "flax", "numpy", "transformers", "tokenizers")
RIVALS_PACKAGES = ("torch", "llama-cpp-python")


class Encoded(NamedTuple):
    """A set of prompts as token ids; `numbers` are those of the prompts in the set."""

    name: str
    numbers: tuple[int, ...]
    prompts: tuple[list[int], ...]
    categories: tuple[str, ...]

    @property
    def identity(self) -> PromptsOf:
        """For the head of a file of results."""
        text = repr((self.numbers, self.prompts, self.categories))
        checksum = hashlib.sha256(text.encode()).hexdigest()[:16]
        return PromptsOf(name=self.name, count=len(self.prompts), digest=checksum)


class Progress(NamedTuple):
    """How far a measurement is: runs done and in all, what comes next, and seconds left."""

    done: int
    total: int
    text: str
    seconds_left: float | None


def encode(
    llm: LLM, sets: Sequence[PromptSet], max_tokens: int, on_note: Callable[[str], None]
) -> list[Encoded]:
    """The sets' tokens; prompts that leave no room for an answer are left out.

    Raises:
      BenchmarkError: two sets have the same name, or nothing is left of one.
    """
    found: list[Encoded] = []
    for each in sets:
        if any(each.name == other.name for other in found):
            raise BenchmarkError(f"two sets of prompts are named {each.name!r}; rename a file.")
        has_template = llm.tokenizer.chat_template is not None
        ids = {
            i: llm.tokenizer.encode_chat([{"role": "user", "content": prompt.text}])
            if prompt.chat and has_template
            else llm.tokenizer.encode(prompt.text)
            for i, prompt in enumerate(each.prompts)
        }
        fitting = [i for i in ids if 0 < len(ids[i]) <= llm.max_model_len - max_tokens]
        if len(fitting) < len(ids):
            left = f"{len(ids) - len(fitting)} of {len(ids)} prompts of {each.name}"
            room = f"a context of {llm.max_model_len} with {max_tokens} tokens of answer"
            if not fitting:
                raise BenchmarkError(f"{left} do not fit {room}; give a larger --max-model-len.")
            on_note(f"{left} are left out: they do not fit {room}")
        found.append(
            Encoded(
                each.name,
                tuple(fitting),
                tuple(ids[i] for i in fitting),
                tuple(each.prompts[i].category for i in fitting),
            )
        )
    return found


def describe(
    llm: LLM,
    runners: Sequence[Runner],
    sets: Sequence[Encoded],
    *,
    target: str,
    draft: str | None,
    options: Mapping[str, str],
    settings: Sequence[Setting],
    batch_sizes: Sequence[int],
    max_tokens: int,
    ignore_eos: bool,
    repeats: int,
    seed: int,
    command: str,
) -> Header:
    """The head of the file: what is going to be measured, and on what."""
    devices = Counter(device.device_kind for device in jax.devices())
    return Header(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=command,
        versions=_versions(),
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, native code: "
        f"{native.description()}",
        devices=dict(devices),
        layout=llm.layout.name if llm.layout else "one device",
        target=target,
        draft=draft,
        dtype=llm.dtype,
        quantization=llm.quantization,
        options=dict(options),
        seed=seed,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        repeats=repeats,
        settings=tuple(settings),
        batch_sizes=tuple(batch_sizes),
        systems=tuple(runner.system for runner in runners),
        prompts=tuple(each.identity for each in sets),
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in (*PACKAGES, *RIVALS_PACKAGES):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def measure(
    header: Header,
    runners: Sequence[Runner],
    sets: Sequence[Encoded],
    writer: Writer | None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> None:
    """Measures what the file does not hold yet, and writes each run as it ends.

    Args:
      header: what to measure.
      runners: the systems, in the header's order; the first ones are this library's.
      sets: the prompts.
      writer: where to; None in processes that write nothing.
      on_progress: called before each run.
    """
    done = set(
        distributed.from_first(
            lambda: [repr(run.key) for run in writer.results.runs] if writer else []
        )
    )
    known = distributed.from_first(lambda: list(writer.results.costs) if writer else [])

    def keep(line: Run | Costs) -> None:
        if writer is not None:
            writer.add(line)

    cells = [
        (prompts, setting, batch)
        for batch, prompts, setting in itertools.product(header.batch_sizes, sets, header.settings)
    ]
    plan = [
        (prompts, setting, batch, repeat, runner)
        for prompts, setting, batch in cells
        for repeat in range(header.repeats)
        for runner in (one_of_each(runners) if not setting.temperature else runners)
        if runner.can(setting, batch)
    ]
    todo = [each for each in plan if repr(_key(*each)) not in done]
    pace = _Pace(len(plan), todo, on_progress)
    warm: set[tuple] = set()
    costed = set(known)
    for prompts, setting, batch, repeat, runner in todo:
        name = f"{prompts.name}, {setting.name}, batch {batch}, {repeat}"
        key = _key(prompts, setting, batch, repeat, runner)
        if batch not in costed:
            costed.add(batch)
            pace.show(f"cost of calls, batch {batch}")
            if (costs := _costs(runners, batch, header.repeats)) is not None:
                keep(costs)
        pace.show(f"{prompts.name}, {setting.name}, batch {batch}: {runner.system.name}")
        task = Task(
            prompts.numbers,
            prompts.prompts,
            prompts.categories,
            setting,
            [_seed(header.seed, repeat, number) for number in prompts.numbers],
            header.max_tokens,
            header.ignore_eos,
            batch,
            name,
        )
        cold = key[:-1] not in warm
        with pace.timed(cold):
            if cold:
                warm.add(key[:-1])
                runner.run(task.warm_up())
            seconds, requests = runner.run(task)
        keep(
            Run(
                prompts=prompts.name,
                setting=setting,
                batch_size=batch,
                system=runner.system.name,
                repeat=repeat,
                seconds=seconds,
                requests=tuple(requests),
            )
        )
    pace.show("done")


def _key(prompts: Encoded, setting: Setting, batch: int, repeat: int, runner: Runner) -> tuple:
    """As `Run.key`."""
    return (prompts.name, setting, batch, runner.system.name, repeat)


def _costs(runners: Sequence[Runner], batch: int, repeats: int) -> Costs | None:
    """None where a call cannot be timed by itself: with an encoder, or with several processes."""
    ours = [runner for runner in runners if isinstance(runner, Ours)]
    target = ours[0].llm.engine.target
    if target.config.encoder is not None or distributed.process()[1] > 1:
        return None
    shards = target.placement.num_shards("batch")
    return measure_costs(ours, batch, repeats) if batch % shards == 0 else None


def _seed(seed: int, repeat: int, number: int) -> int:
    """The seed of a request: the same for all systems of a repeat, so that they compare."""
    return int(np.random.SeedSequence((seed, repeat, number)).generate_state(1, np.uint64)[0])


class _Pace:
    """Counts runs and tells how long the rest should take, by the runs so far.

    Args:
      total: runs in all.
      todo: those that are left.
      on_progress: told of each.
    """

    def __init__(self, total: int, todo: Sequence[tuple], on_progress: Callable[[Progress], None]):
        self._total, self._left, self._on_progress = total, len(todo), on_progress
        cells = {(*_key(*each)[:-1],) for each in todo}
        self._cold = len(cells)  # whose first run compiles, and takes longer
        self._timed: dict[bool, list[float]] = {True: [], False: []}

    def show(self, text: str) -> None:
        known = self._timed[False] or self._timed[True]
        left = None
        if known:
            cold = statistics.fmean(self._timed[True] or known)
            warm = statistics.fmean(known)
            left = self._cold * cold + (self._left - self._cold) * warm
        self._on_progress(Progress(self._total - self._left, self._total, text, left))

    @contextlib.contextmanager
    def timed(self, cold: bool) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._timed[cold].append(time.perf_counter() - begin)
        self._left, self._cold = self._left - 1, self._cold - cold
