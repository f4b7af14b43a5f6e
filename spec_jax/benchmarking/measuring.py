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
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from spec_jax import distributed
from spec_jax.benchmarking.costs import measure_costs
from spec_jax.benchmarking.prompts import PromptSet
from spec_jax.benchmarking.results import BenchRun, Costs, Header, PromptsOf, Setting, Writer
from spec_jax.benchmarking.systems import BenchTask, EncodedPrompt, Ours, Runner, one_of_each
from spec_jax.errors import BenchmarkError
from spec_jax.kernels import native
from spec_jax.llm import LLM

PACKAGES = (
    *("spec-jax", "jax", "jaxlib", "flax", "numpy", "transformers", "tokenizers"),
    *("torch", "llama-cpp-python"),
)


class EncodedSet(NamedTuple):
    """A set of prompts as token ids."""

    name: str
    prompts: tuple[EncodedPrompt, ...]

    @property
    def identity(self) -> PromptsOf:
        """Its name, size and checksum."""
        checksum = hashlib.sha256(repr(tuple(zip(*self.prompts, strict=True))).encode())
        digest = checksum.hexdigest()[:16]
        return PromptsOf(name=self.name, count=len(self.prompts), digest=digest)


class BenchProgress(NamedTuple):
    """Runs done and in all, what comes next, and the seconds left."""

    done: int
    total: int
    text: str
    seconds_left: float | None


def encode(
    llm: LLM, sets: Sequence[PromptSet], max_tokens: int, on_note: Callable[[str], None]
) -> list[EncodedSet]:
    """The sets' tokens, without prompts that leave no room for an answer.

    Raises:
      BenchmarkError: two sets have the same name, or no prompt of a set fits.
    """
    encoded: list[EncodedSet] = []
    has_template = llm.tokenizer.chat_template is not None
    for name, prompts in sets:
        if any(name == other.name for other in encoded):
            raise BenchmarkError(f"two sets of prompts are named {name!r}; rename a file.")
        fitting = []
        for number, (text, category, chat) in enumerate(prompts):
            if chat and has_template:
                ids = llm.tokenizer.encode_chat([{"role": "user", "content": text}])
            else:
                ids = llm.tokenizer.encode(text)
            if 0 < len(ids) <= llm.max_model_len - max_tokens:
                fitting.append(EncodedPrompt(number, ids, category))
        if len(fitting) < len(prompts):
            omitted = f"{len(prompts) - len(fitting)} of {len(prompts)} prompts of {name}"
            room = f"a context of {llm.max_model_len} with {max_tokens} tokens of answer"
            if not fitting:
                raise BenchmarkError(f"{omitted} do not fit {room}; give a larger --max-model-len.")
            on_note(f"{omitted} are left out: they do not fit {room}")
        encoded.append(EncodedSet(name, tuple(fitting)))
    return encoded


def describe(
    llm: LLM, runners: Sequence[Runner], sets: Sequence[EncodedSet], **fields: Any
) -> Header:
    """The header of the file: what is measured, on which machine.

    `fields` are other fields of `Header`, as the user gave them.
    """
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return Header(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions=versions,
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, native code: "
        f"{native.description()}",
        devices=dict(Counter(device.device_kind for device in jax.devices())),
        layout=llm.layout.name if llm.layout else "one device",
        dtype=llm.dtype,
        quantization=llm.quantization,
        systems=tuple(runner.system for runner in runners),
        prompts=tuple(each.identity for each in sets),
        **fields,
    )


class _Step(NamedTuple):
    """One run of the plan; runs of the same shape share their programs."""

    prompts: EncodedSet
    setting: Setting
    batch_size: int
    repeat: int
    runner: Runner

    @property
    def shape(self) -> tuple:
        return (self.prompts.name, self.setting, self.batch_size, self.runner.system.name)

    @property
    def key(self) -> str:
        """`BenchRun.key` as text."""
        return repr((*self.shape, self.repeat))


def measure(
    header: Header,
    runners: Sequence[Runner],
    sets: Sequence[EncodedSet],
    writer: Writer | None,
    on_progress: Callable[[BenchProgress], None] = lambda progress: None,
) -> None:
    """Measures what the file does not hold yet, and writes each run as it ends.

    The systems are in the header's order, and this library's come first. The writer is None in
    processes that write nothing.
    """
    runs = distributed.from_first(
        lambda: [repr(run.key) for run in writer.results.runs] if writer else []
    )
    costed = set(distributed.from_first(lambda: list(writer.results.costs) if writer else []))
    write = writer.add if writer else lambda line: None
    plan = [
        _Step(prompts, setting, batch_size, repeat, runner)
        for batch_size, prompts, setting in itertools.product(
            header.batch_sizes, sets, header.settings
        )
        for repeat in range(header.repeats)
        for runner in (one_of_each(runners) if not setting.temperature else runners)
        if runner.can(setting, batch_size)
    ]
    steps = [each for each in plan if each.key not in runs]
    pace = _Pace(len(plan), steps, on_progress)
    for step in steps:
        prompts, setting, batch_size, repeat, runner = step
        if batch_size not in costed:
            costed.add(batch_size)
            pace.show(f"cost of calls, batch {batch_size}")
            if (costs := _costs(runners, batch_size, header.repeats)) is not None:
                write(costs)
        cell = f"{prompts.name}, {setting.name}, batch {batch_size}"
        pace.show(f"{cell}: {runner.system.name}")
        task = BenchTask(
            prompts.prompts,
            [_seed(header.seed, repeat, prompt.number) for prompt in prompts.prompts],
            setting,
            header.max_tokens,
            header.ignore_eos,
            batch_size,
            f"{cell}, {repeat}",
        )
        begin = time.perf_counter()
        if pace.compiles(step):
            runner.run(task.warm_up())
        seconds, requests = runner.run(task)
        pace.add(step, time.perf_counter() - begin)
        write(
            BenchRun(
                prompts=prompts.name,
                setting=setting,
                batch_size=batch_size,
                system=runner.system.name,
                repeat=repeat,
                seconds=seconds,
                requests=tuple(requests),
            )
        )
    pace.show("done")


def _costs(runners: Sequence[Runner], batch: int, repeats: int) -> Costs | None:
    """None where a call cannot be timed alone: with an encoder, or with several processes."""
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
    """Counts runs and estimates the time left; the first run of each shape compiles."""

    def __init__(
        self, total: int, steps: Sequence[_Step], on_progress: Callable[[BenchProgress], None]
    ):
        self._total, self._on_progress = total, on_progress
        self._left = Counter(step.shape for step in steps)
        self._seconds: dict[tuple, list[float]] = defaultdict(list)

    def compiles(self, step: _Step) -> bool:
        """Whether it is the first run of its shape."""
        return step.shape not in self._seconds

    def add(self, step: _Step, seconds: float) -> None:
        self._seconds[step.shape].append(seconds)
        self._left[step.shape] -= 1

    def show(self, text: str) -> None:
        warm = [each for some in self._seconds.values() for each in some[1:]]
        cold = [some[0] for some in self._seconds.values()]
        left, seconds = self._left.total(), None
        if cold:
            new = len(self._left.keys() - self._seconds.keys())
            seconds = new * statistics.fmean(cold)
            seconds += (left - new) * statistics.fmean(warm or cold)
        self._on_progress(BenchProgress(self._total - left, self._total, text, seconds))
