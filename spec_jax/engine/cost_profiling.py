"""The host's side of adaptive draft lengths: measured costs of rounds, remembered acceptances."""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spec_jax import distributed
from spec_jax.config import cache_directory
from spec_jax.decoding.adaptive import Adaptive, AdaptiveState
from spec_jax.decoding.state import LENGTH, RUNNING, DecodeState
from spec_jax.engine.acceptances import Acceptances
from spec_jax.engine.batch_shape import BatchShape
from spec_jax.engine.compile_cache import machine_name
from spec_jax.engine.prompt_reading import PromptReading
from spec_jax.engine.requests import Request
from spec_jax.files import replace_text
from spec_jax.kernels import native

Advance = Callable[[DecodeState, int, int], DecodeState]
"""Decodes a state for at most a number of rounds, while a minimum number of rows run."""

SAMPLES_EACH, ROUNDS_A_SAMPLE = 3, 4
"""Samples of each choice of K, of which the quickest counts, and rounds of a sample. The time of
the quickest call without rounds is subtracted: of a small model it is as long as a round."""
_VERSION = "9"
"""Of the way in which costs are measured and kept: costs of another one are not read."""

MIN_DRAFTING = 1.03
"""A round with a draft takes at least this many times as long as one without: drafts that are never
right would otherwise go on for ever where noise hides what they cost."""

HOPELESS = 1.25
"""A round that takes this many times as long as its tokens would take one by one never pays."""

PROMPTS_A_CHECK = 16
"""Prompts of which a drafter reads one if its drafts do not pay."""

KINDS = "greedy", "sampled"
"""Requests whose drafts are accepted differently often: as loops compute them."""

MAX_KEPT = 128
"""Loads whose costs a file keeps: as many as there are programs."""


@dataclasses.dataclass(frozen=True)
class Load:
    """What decides how long rounds take.

    Attributes:
      shape: of the batch, `BatchShape.of_rounds`.
      running: its rows that run, or somewhat more: a power of two. The others may cost nothing.
    """

    shape: BatchShape
    running: int


def costs_file(models: Any, *choices: Any) -> Path:
    """The file that keeps the costs of rounds of some models on this machine.

    Args:
      models: a pytree of target and drafter; its structure, with all that is static, and the shapes
        and dtypes of its arrays count.
      choices: everything else that the cost of a round depends on.
    """
    leaves, structure = jax.tree.flatten(models)
    arrays = [f"{each.shape} {each.dtype}" for each in leaves]
    device, variant = jax.devices()[0], os.environ.get(native.SWITCH)
    machine = machine_name(), os.cpu_count(), variant, device.device_kind, jax.__version__
    text = "\n".join([_VERSION, str(structure), *arrays, *map(repr, choices), repr(machine)])
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    return cache_directory() / "costs" / f"{name}.json"


class _Samples:
    """Measured seconds of a round, for each choice of K.

    The first sample of each warms up, and lets a drafter read tokens that it has not read yet. A K
    larger than one that would not pay if every token were accepted is not sampled: in a large batch
    its rounds take long.
    """

    def __init__(self, choices: Sequence[int]):
        self._choices = choices
        self._call = math.inf
        self._samples: list[list[tuple[float, int]]] = [[] for _ in choices]

    def add(self, at: int, call: float, seconds: float, num_rounds: int) -> None:
        """Adds the seconds of a call without rounds, and of one with rounds of a choice."""
        self._call = min(self._call, call)
        self._samples[at].append((seconds, num_rounds))

    def _quickest(self, samples: Sequence[tuple[float, int]]) -> float:
        # Never 0: a clock may be coarse.
        return max(min((seconds - self._call) / count for seconds, count in samples), 1e-9)

    def next(self) -> int | None:
        """Which choice to sample now; None if nothing is left to measure."""
        counts = [len(each) for each in self._samples[: self._num_sampled()]]
        return None if min(counts) > SAMPLES_EACH else counts.index(min(counts))

    def costs(self) -> list[float]:
        """The quickest sample of each choice; of those not sampled, in proportion to K + 1.

        Other work on the machine may delay some samples. But a longer draft takes no less time than
        a shorter one, and no draft is free.
        """
        count = self._num_sampled()
        costs = [self._quickest(each[1:]) for each in self._samples[:count]]
        a_token = costs[-1] / (self._choices[count - 1] + 1)
        costs += [a_token * (choice + 1) for choice in self._choices[count:]]
        plain, *drafting = np.minimum.accumulate(costs[::-1])[::-1].tolist()
        return [plain, *(max(each, MIN_DRAFTING * plain) for each in drafting)]

    def _num_sampled(self) -> int:
        """How many choices are sampled: up to the first that would not pay."""
        for at, (choice, samples) in enumerate(zip(self._choices, self._samples, strict=True)):
            if samples:
                pays_below = HOPELESS * (choice + 1) * self._quickest(self._samples[0])
                if self._quickest(samples) > pays_below:
                    return at + 1
        return len(self._choices)


class CostProfiler:
    """Gives an `Adaptive` policy its costs and the acceptances of earlier requests.

    Costs are measured once for each load, in the first rounds that are decoded under it: their
    tokens count like any others. Several processes use the times of process 0, and later processes
    the times, and the acceptances, that a file has kept.

    Args:
      policy: whose state to fill in.
      file: see `costs_file`; None keeps nothing.
      share: the time in which the drafter reads a prompt, as a part of the target's; None if it
        has to read all, or reads none.
    """

    def __init__(self, policy: Adaptive, file: Path | None = None, share: float | None = None):
        self.policy, self._file = policy, file
        costs, acceptances, reading, self._num_plain = {}, {}, None, 0
        if file is not None:
            # A process that decodes a single prompt may be the one that reads it with the drafter.
            costs, acceptances, reading, self._num_plain = distributed.from_first(
                lambda: (*self._read(file), os.getpid() % PROMPTS_A_CHECK)
            )
        self.costs = {key: np.array(each) for key, each in costs.items()}
        """Seconds of a round, for each of the policy's choices, by load."""
        self._samples: dict[str, _Samples] = {}
        self.acceptances = {
            kind: Acceptances.from_file(acceptances.get(kind), policy)
            or Acceptances.before_any(policy)
            for kind in KINDS
        }
        """What finished requests of each kind tell."""
        self.reading = None if share is None else PromptReading.from_file(share, reading)
        """What it takes the drafter to read prompts; None if it must read all, or reads none."""
        self._written = self._acceptances_for_file

    def begin(self, load: Load, state: DecodeState) -> DecodeState:
        """The state of new rows, which start from the statistics of earlier ones."""
        shape, may_draft = state.finish.shape, distributed.to_host(state.may_draft)
        earlier = self.acceptances[_kind(load)]
        changes = {
            "accepted": np.where(may_draft, earlier.rate * self.policy.prior_tokens, 0.0),
            **{
                name: np.full(shape, getattr(earlier, name), np.float32)
                for name in ("lost", "spent", "credit")
            },
        }
        return self.with_costs(load, _with(state, changes))

    def expects_drafts(self, load: Load, requests: Sequence[Request], num_running: int) -> bool:
        """Whether new rows may draft, so that the drafter reads their prompts.

        It does if their drafts should save more time than reading takes. If only better drafts than
        the last ones would, it reads one prompt of a number, to see whether they have become so.

        Args:
          load: with the new rows.
          requests: the new rows.
          num_running: rows that will share each round, the new ones included.
        """
        costs, earlier = self.costs.get(str(load)), self.acceptances[_kind(load)]
        if costs is None or self.reading is None:
            return True
        prompts = [len(each.prompt_token_ids) for each in requests]
        answers = sum(
            min(each.max_length - prompt, earlier.answer)
            for each, prompt in zip(requests, prompts, strict=True)
        )
        reading = self.reading.drafter_seconds(sum(prompts))

        def pays(rate: float) -> bool:
            return answers / num_running * self.policy.seconds_saved(rate, costs) > reading

        if pays(earlier.rate):
            return True
        self._num_plain += pays(1.0)
        return pays(1.0) and self._num_plain % PROMPTS_A_CHECK == 0

    def record_reading(self, requests: Sequence[Request], num_copied: int, seconds: float) -> None:
        """Records what it took to read prompts together; later requests know it.

        Args:
          requests: whose prompts were read, but for the last token.
          num_copied: tokens of them that were copied.
          seconds: what reading took.
        """
        if self.reading is not None:
            num_tokens = sum(len(each.prompt_token_ids) - 1 for each in requests) - num_copied
            seconds = distributed.from_first(lambda: seconds)
            self.reading.add(
                num_tokens, seconds, drafter_too=any(each.may_draft for each in requests)
            )

    def with_costs(self, load: Load, state: DecodeState) -> DecodeState:
        """The state with the costs that are known for a load, if they are."""
        if str(load) not in self.costs:
            return state
        return _with(state, {"costs": self.costs[str(load)].astype(np.float32)})

    def advance(
        self, load: Load, state: DecodeState, rounds: int, min_running: int, advance: Advance
    ) -> DecodeState:
        """Decodes; first measures costs that are still unknown for the load."""
        if str(load) not in self.costs:
            state = self._measure(load, state, min_running, advance)
        return advance(state, rounds, min_running)

    def _measure(
        self, load: Load, state: DecodeState, min_running: int, advance: Advance
    ) -> DecodeState:
        """Times rounds of each K in turn, as long as a row can still draft that many tokens."""
        choices = self.policy.choices
        samples = self._samples.setdefault(str(load), _Samples(choices))
        while (at := samples.next()) is not None:
            choice = choices[at]
            finish, room, may_draft = distributed.to_host(
                (state.finish, state.max_lengths - state.lengths, state.may_draft)
            )
            running, needed = finish == RUNNING, ROUNDS_A_SAMPLE * (choice + 1)
            drafting = running & may_draft & (room >= needed)  # without any, drafts cost nothing
            if running.sum() < min_running or not drafting.any():
                return _with(state, {"forced": np.int32(-1)})
            state = _with(state, {"forced": np.int32(choice)})
            before = distributed.to_host(state.counters.rounds)
            begin = time.perf_counter()
            state = jax.block_until_ready(advance(state, 0, min_running))  # what a call takes
            middle = time.perf_counter()
            state = jax.block_until_ready(advance(state, ROUNDS_A_SAMPLE, min_running))
            end = time.perf_counter()
            num_rounds = int((distributed.to_host(state.counters.rounds) - before).max())
            times = middle - begin, end - middle, num_rounds
            samples.add(at, *distributed.from_first(lambda each=times: each))
        costs = self.costs[str(load)] = np.array(samples.costs())
        self._write()
        return _with(state, {"forced": np.int32(-1), "costs": costs.astype(np.float32)})

    def _read(self, file: Path) -> tuple[dict[str, list[float]], dict[str, Any], Any]:
        """The costs, acceptances and reading of a file; damaged costs are measured again."""
        content: Any = None
        with contextlib.suppress(OSError, ValueError):
            content = json.loads(file.read_text())
        parts = content if isinstance(content, dict) else {}
        costs, acceptances = (
            parts[name] if isinstance(parts.get(name), dict) else {}
            for name in ("costs", "acceptances")
        )
        costs = {key: each for key, each in costs.items() if self._are_costs(each)}
        return costs, acceptances, parts.get("reading")

    def _are_costs(self, each: Any) -> bool:
        return (
            isinstance(each, list)
            and len(each) == len(self.policy.choices)
            and all(isinstance(cost, float) and 0 < cost < math.inf for cost in each)
        )

    @property
    def _acceptances_for_file(self) -> dict[str, list[float]]:
        return {kind: each.for_file() for kind, each in self.acceptances.items()}

    def _write(self) -> None:
        """Keeps all that is known, with the costs that another process has kept meanwhile."""
        if self._file is None or jax.process_index() != 0:
            return
        costs, *_ = self._read(self._file)
        costs |= {key: each.tolist() for key, each in self.costs.items()}
        self._written = self._acceptances_for_file
        content = {
            "costs": dict(list(costs.items())[-MAX_KEPT:]),
            "acceptances": self._written,
            "reading": self.reading and self.reading.for_file(),
        }
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self._file, json.dumps(content))

    def record(self, load: Load, state: DecodeState, rows: Sequence[int]) -> None:
        """Records the acceptances and answers of finished rows; earlier rows count less."""
        adaptive: AdaptiveState = state.draft_length
        names = ("accepted", "judged", "lost", "spent", "credit")
        statistics, rounds, may_draft, tokens, finish = distributed.to_host(
            (
                {name: getattr(adaptive, name) for name in names},
                state.counters.rounds,
                state.may_draft,
                state.lengths - state.prompt_lengths,
                state.finish,
            )
        )
        decoded = [row for row in rows if rounds[row] > 0]
        if not decoded:
            return
        kind = _kind(load)
        acceptances, used = self.acceptances[kind], [row for row in decoded if may_draft[row]]
        acceptances.add_answers(tokens[decoded], finish[decoded] == LENGTH)
        if used:
            means = {name: float(each[used].mean()) for name, each in statistics.items()}
            acceptances.add(**means)
        if acceptances.differs(self._written[kind]):
            self._write()


def _kind(load: Load) -> str:
    """The kind of a loop's requests: greedy ones beside sampled ones count as sampled."""
    return KINDS[load.shape.features.random]


def _with(state: DecodeState, changes: dict[str, Any]) -> DecodeState:
    """The state with some arrays of its draft-length policy replaced; shardings are kept."""
    arrays = {}
    for name, value in changes.items():
        old: jax.Array = getattr(state.draft_length, name)
        value = np.asarray(value).reshape(old.shape)
        arrays[name] = jax.make_array_from_callback(
            old.shape, old.sharding, lambda part, value=value: value[part]
        )
    return dataclasses.replace(
        state, draft_length=dataclasses.replace(state.draft_length, **arrays)
    )
