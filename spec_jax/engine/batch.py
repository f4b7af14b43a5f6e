"""A batch that is being decoded, as the host sees it."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from spec_jax import distributed
from spec_jax.decoding.state import RUNNING, STOP, DecodeState
from spec_jax.drafters.base import Draft
from spec_jax.engine.admission import PADDING, Admission, Rows
from spec_jax.engine.cost_profiling import CostProfiler
from spec_jax.engine.host_rounds import HostDrafts, HostRounds
from spec_jax.engine.programs import Rounds
from spec_jax.engine.requests import Request
from spec_jax.text.grammar import Grammar


@dataclasses.dataclass(frozen=True)
class View:
    """The host's copy of the parts of a state that requests need, as NumPy arrays.

    Attributes:
      tokens: int32 [batch, length], prompt and output.
      lengths: int32 [batch].
      finish: int32 [batch], RUNNING or why the row ended.
      counters: counters of the rounds.
      logprobs: of generated tokens, or None.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    finish: np.ndarray
    counters: Any
    logprobs: Any

    def work(self, slot: int) -> "Work":
        """The totals of a row's rounds."""
        counters = self.counters
        return Work(
            rounds=int(counters.rounds[slot]),
            drafted=int(counters.drafted[slot]),
            accepted=int(counters.accepted[slot]),
            accepted_per_position=tuple(counters.accepted_per_position[slot].tolist()),
        )

    def work_until(self, slot: int, begin: int, end: int) -> "Work":
        """The totals of a row's rounds if token `end - 1` was a stop that only the host knew.

        They are counted as for a stop token on the device: without rounds after it and without
        tokens drafted past it. `begin` is the length of the prompt.
        """
        whole, lookahead = self.work(slot), self.counters.accepted_per_position.shape[1]
        log = self.counters.drafted_at[slot, begin : self.lengths[slot]]
        starts, end = np.flatnonzero(log), end - begin
        emitted = np.diff(starts, append=len(log))
        accepted = emitted - 1
        accepted[-1] = whole.accepted - accepted[:-1].sum()
        seen = np.minimum(emitted, end - starts)[starts < end]
        kept = np.minimum(accepted[: len(seen)], seen)
        drafted = log[starts][: len(seen)] - 1
        drafted[-1] = min(drafted[-1], seen[-1])
        per_position = (np.arange(lookahead)[None] < kept[:, None]).sum(0)
        return Work(len(seen), int(drafted.sum()), int(kept.sum()), tuple(per_position.tolist()))


@dataclasses.dataclass(frozen=True)
class Work:
    """The totals of one request's rounds; as in `Counters`."""

    rounds: int
    drafted: int
    accepted: int
    accepted_per_position: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Wall time of prefill, of rounds, and of compilation, which neither of them includes."""

    prefill: float = 0.0
    decode: float = 0.0
    compile: float = 0.0


class Batch:
    """A batch being decoded, and the host's latest copy of it.

    Args:
      admission: how requests enter it.
      rounds: its compiled rounds.
      host: drafts on the host, if the method does.
      profiler: measures what an adaptive policy's rounds cost.
      on_draft: called with each round's draft before it is verified; rounds are then run in two
        parts, which takes time.

    Attributes:
      seconds: the time that it took so far.
    """

    def __init__(
        self,
        admission: Admission,
        rounds: Rounds,
        host: HostDrafts | None = None,
        profiler: CostProfiler | None = None,
        on_draft: Callable[[Draft], None] | None = None,
    ):
        size = admission.bucket.batch
        self.seconds = Seconds()
        self._admission, self._rounds, self._profiler = admission, rounds, profiler
        self._host, self._watched = host, on_draft is not None
        self._grammars: list[Grammar | None] = [None] * size
        self._host_rounds = HostRounds(rounds, self._grammars, host, on_draft)
        self._began = [Seconds()] * size
        self._running: set[int] = set()
        self._rows: Rows | None = None
        self._view: View | None = None

    @property
    def state(self) -> DecodeState:
        """The device's state; replaced, never shared, since its buffers are donated."""
        assert self._rows is not None, "no row has joined yet"
        return self._rows.state

    @state.setter
    def state(self, state: DecodeState) -> None:
        assert self._rows is not None, "no row has joined yet"
        self._rows = dataclasses.replace(self._rows, state=state)
        self._view = None

    def slots(self, count: int) -> list[int]:
        """Which slots to use for `count` rows: about as many of each shard."""
        return self._admission.slots(count)

    def join(self, requests: Mapping[int, Request]) -> None:
        """Reads the prompts of requests and puts their rows into slots that have none running.

        Args:
          requests: by slot. All fit the bucket and the room that the batch was made for.
        """
        for group in self._admission.groups(list(requests)):
            taken = [slot for slot in group if slot is not None]
            before = self.seconds.prefill
            with self._measured("prefill"):
                self._enter(group, requests)
            share = (self.seconds.prefill - before) / len(taken)
            for slot in taken:
                request = requests[slot]
                self._began[slot] = dataclasses.replace(self.seconds, prefill=share)
                self._grammars[slot] = request.grammar
                if len(request.prompt_token_ids) < request.max_length:
                    self._running.add(slot)

    def _enter(self, group: Sequence[int | None], requests: Mapping[int, Request]) -> None:
        """Reads the prompts of one call, and puts the rows into their slots."""
        asked = [PADDING if slot is None else requests[slot] for slot in group]
        rows = self._admission.read(asked)
        self._rounds.key = self._admission.key(rows)
        rows = dataclasses.replace(rows, state=self._with_costs(rows.state))
        if self._admission.is_whole(group) and not self._running:
            self._rows = rows  # nothing else is in the batch
        else:
            if self._rows is None:
                empty = self._admission.empty(rows)
                self._rows = dataclasses.replace(empty, state=self._with_costs(empty.state))
            self._rows = self._admission.join(self._rows, group, rows)
        self._rounds.sampling, self._view = self._rows.sampling, None
        if self._host is not None:
            self._host.join(group, asked, self._admission.places(group))
        jax.block_until_ready(self._rows.state)

    def _with_costs(self, state: DecodeState) -> DecodeState:
        return state if self._profiler is None else self._profiler.begin(self._rounds.key, state)

    def advance(self, max_rounds: int, min_running: int = 1) -> None:
        """Decodes at most `max_rounds` rounds, and none with less than `min_running` rows."""
        by_host = self._host is not None or self._watched or any(self._grammars)
        rounds = self._host_rounds.advance if by_host else self._rounds.decode
        with self._measured("decode"):
            if self._profiler is None:
                state = rounds(self.state, max_rounds, min_running)
            else:
                key = self._rounds.key
                state = self._profiler.advance(key, self.state, max_rounds, min_running, rounds)
            self.state = jax.block_until_ready(state)
        self._end([slot for slot in sorted(self._running) if self.view.finish[slot] != RUNNING])

    def compile_rounds(self) -> None:
        """Has its rounds compiled by a compiler whose programs run nothing."""
        self._rounds.decode(self.state, 1)

    def stop(self, slots: Sequence[int]) -> None:
        """Ends rows whose stop string the host has found."""
        finish = self.view.finish.copy()
        finish[list(slots)] = STOP
        sharding = self.state.finish.sharding
        ended = jax.make_array_from_callback(finish.shape, sharding, lambda part: finish[part])
        self.state = dataclasses.replace(self.state, finish=ended)
        self._end(slots)

    def _end(self, slots: Sequence[int]) -> None:
        """Records rows that have finished."""
        if self._profiler is not None and slots:
            self._profiler.learn(self.state, slots)
        self._running.difference_update(slots)
        for slot in slots:
            self._grammars[slot] = None

    @property
    def view(self) -> View:
        """The current state, copied to the host when first needed."""
        if self._view is None:
            state = self.state
            seen = (state.tokens, state.lengths, state.finish, state.counters, state.logprobs)
            self._view = View(*distributed.to_host(seen))
        return self._view

    @property
    def running(self) -> bool:
        """Whether any row still decodes."""
        return bool(self._running)

    def seconds_of(self, slot: int) -> Seconds:
        """The time that the request in a slot took so far.

        Its share of the call that read its prompt, the rounds since it joined, and all compilation
        since the batch was made.
        """
        began = self._began[slot]
        return Seconds(began.prefill, self.seconds.decode - began.decode, self.seconds.compile)

    @contextlib.contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        """Adds the time taken to `seconds`, without compilation."""
        begin, compiled = time.perf_counter(), self._rounds.compiler.seconds
        yield
        taken, compiled = time.perf_counter() - begin, self._rounds.compiler.seconds - compiled
        parts = {name: getattr(self.seconds, name) + taken - compiled}
        self.seconds = dataclasses.replace(
            self.seconds, compile=self.seconds.compile + compiled, **parts
        )
