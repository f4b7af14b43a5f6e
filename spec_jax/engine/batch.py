"""A batch that is being decoded, as the host sees it: rows enter its slots and leave them."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Int

from spec_jax import distributed
from spec_jax.decoding.state import RUNNING, STOP, DecodeState
from spec_jax.drafters.base import Draft
from spec_jax.engine.batch_shape import BatchShape, prompt_block
from spec_jax.engine.cost_profiling import CostProfiler
from spec_jax.engine.host_rounds import HostDrafts, HostRounds
from spec_jax.engine.programs import Compiler
from spec_jax.engine.requests import PADDING, Request
from spec_jax.engine.rounds import Rounds
from spec_jax.engine.rows import DeviceRows, RowPrograms
from spec_jax.engine.view import Seconds, View
from spec_jax.sampling.parameters import SamplingFeatures

TOKENS_AT_ONCE = 256
"""Tokens that an accelerator reads in about the time of one, because it reads its weights once.

Prompts of entering rows are read together up to this many. On CPU the time grows with the tokens.
"""


def rows_read_together(platform: str, shape: BatchShape, shards: int) -> int:
    """Rows whose prompts are read by one call while others of the batch decode.

    Args:
      platform: of the target.
      shape: of the batch, with the block of prompts that are read on their own.
      shards: of the batch's rows.
    """
    if platform == "cpu":
        return shards
    return min(shape.batch, max(1, TOKENS_AT_ONCE // shape.block) * shards)


class Batch:
    """A batch being decoded, and the host's latest copy of it.

    A row's cache does not depend, to the last bit, on when it enters or on which rows enter with
    it, as long as the same number of rows is read by a call.

    Args:
      programs: make rows and move them.
      shape: of the batch; it may `grow`.
      together: rows whose prompts are read by one call, a multiple of the shards; by
        default, and after the first ones, as many as pays while other rows decode.
      host: makes what drafts on the host, if the method does.
      profiler: measures what an adaptive policy's rounds cost.
      on_draft: called with each round's draft before it is verified; rounds are then run in two
        parts, which takes time.

    Attributes:
      shape: of the batch.
      seconds: the time that it took so far.
    """

    def __init__(
        self,
        programs: RowPrograms,
        shape: BatchShape,
        *,
        together: int | None = None,
        host: Callable[[Compiler, BatchShape], HostDrafts] | None = None,
        profiler: CostProfiler | None = None,
        on_draft: Callable[[Draft], None] | None = None,
    ):
        self.shape, self.seconds = shape, Seconds()
        self._programs, self._profiler, self._on_draft = programs, profiler, on_draft
        self._together = together
        self._host = None if host is None else host(programs.compiler, shape)
        self._requests: list[Request | None] = [None] * shape.batch
        """The request of each slot, finished ones included, until another takes the slot."""
        self._began = [Seconds()] * shape.batch
        self._running: set[int] = set()
        self._rows: DeviceRows | None = None
        self._rows_shape = shape
        self._view: View | None = None

    @property
    def _shards(self) -> int:
        return self._programs.target.placement.num_shards("batch")

    @property
    def state(self) -> DecodeState:
        """The device's state; replaced, never shared, since its buffers are donated."""
        assert self._rows is not None, "no row has entered yet"
        return self._rows.state

    @state.setter
    def state(self, state: DecodeState) -> None:
        assert self._rows is not None, "no row has entered yet"
        self._rows = dataclasses.replace(self._rows, state=state)
        self._view = None

    def slots(self, count: int) -> list[int]:
        """Which slots to use for `count` rows: about as many of each shard."""
        size = self.shape.batch // self._shards
        return sorted(range(self.shape.batch), key=lambda slot: (slot % size, slot))[:count]

    @property
    def together(self) -> int:
        """Rows whose prompts are read by one call."""
        platform = self._programs.target.platform
        return self._together or rows_read_together(platform, self.shape, self._shards)

    @property
    def prefill_shape(self) -> BatchShape:
        """The shape in which prompts are read."""
        target, together = self._programs.target, self.together
        # All blocks that a prompt may be read in, however long it is.
        fits = prompt_block(
            target.platform, 1 << 20, together // self._shards, target.config.embed_size
        )
        block = self.shape.ring_block or min(self.shape.block, fits)
        return dataclasses.replace(self.shape, batch=together, block=block)

    def grow(self, shape: BatchShape) -> dict[int, int]:
        """Makes room for other rows; the device follows when the next ones enter.

        Args:
          shape: at least the batch's own in everything but features.

        Returns:
          The new number of each slot.
        """
        if self._rows is None or shape.batch == self.shape.batch:
            moved = {slot: slot for slot in range(self.shape.batch)}
        else:
            before, after = (each.batch // self._shards for each in (self.shape, shape))
            moved = {
                slot: slot // before * after + slot % before for slot in range(self.shape.batch)
            }
        requests, began = dict(enumerate(self._requests)), dict(enumerate(self._began))
        self._requests, self._began = [None] * shape.batch, [Seconds()] * shape.batch
        for old, new in moved.items():
            self._requests[new], self._began[new] = requests[old], began[old]
        self._running = {moved[slot] for slot in self._running}
        if self._host is not None:
            self._host.grow(shape, moved)
        self.shape, self._view, self._together = shape, None, None
        return moved

    def insert(self, requests: Mapping[int, Request]) -> None:
        """Reads the prompts of requests and puts their rows into slots that have none running.

        Args:
          requests: by slot. All fit the batch's shape.
        """
        for group in self._groups(list(requests)):
            taken = [slot for slot in group if slot is not None]
            before = self.seconds.prefill
            with self._measured("prefill"):
                self._enter(group, requests)
            share = (self.seconds.prefill - before) / len(taken)
            for slot in taken:
                self._began[slot] = self.seconds._replace(prefill=share)
                if len(requests[slot].prompt_token_ids) < requests[slot].max_length:
                    self._running.add(slot)
        self._together = None  # later ones enter beside rows that decode

    def _enter(self, group: Sequence[int | None], requests: Mapping[int, Request]) -> None:
        """Reads the prompts of one call, and puts the rows into their slots."""
        entering = [PADDING if slot is None else requests[slot] for slot in group]
        programs, shape = self._programs, self.shape
        rows = programs.read(entering, self.prefill_shape)
        if self._profiler is not None:
            rows = dataclasses.replace(rows, state=self._profiler.begin(self._key, rows.state))
        fills_batch = len(group) == shape.batch and all(
            slot in (None, at) for at, slot in enumerate(group)
        )
        if fills_batch and not self._running:
            self._rows = rows  # nothing else is in the batch
        else:
            self._make_room(rows)
            assert self._rows is not None
            self._rows = programs.insert(self._rows, shape, self._places(group), rows)
        for slot in group:
            if slot is not None:
                self._requests[slot] = requests[slot]
        self._rows_shape, self._view = shape, None
        if self._host is not None:
            self._host.insert(group, entering, self._places(group))
        jax.block_until_ready(self._rows.state)

    def _make_room(self, rows: DeviceRows) -> None:
        """Gives the device's batch the shape that the host has decided on."""
        programs, shape, shards = self._programs, self.shape, self._shards
        if self._rows is None or not self._running:
            if self._rows is None or self._rows_shape.of_rows != shape.of_rows:
                self._rows = programs.empty(rows, shape, shards)
        elif self._rows_shape.of_rows != shape.of_rows:
            shapes = self._rows_shape, shape
            self._rows = programs.grow(self._rows, self._requests, shapes, rows, shards)
        else:
            self._rows = self._rows.with_features(shape.features)
            return
        if self._profiler is not None:
            self.state = self._profiler.with_costs(self._key, self.state)

    @property
    def _key(self) -> BatchShape:
        """What decides how long rounds take."""
        return self.shape.of_rounds

    def _groups(self, slots: Sequence[int]) -> list[list[int | None]]:
        """The slots in lists, one for each call that reads prompts.

        Each list has an entry for each row of the call: its slot, or None for padding.
        """
        size, joining = self.shape.batch // self._shards, self.together // self._shards
        waiting = [
            sorted(slot for slot in slots if slot // size == shard) for shard in range(self._shards)
        ]
        calls = max(-(-len(each) // joining) for each in waiting)
        return [
            [
                each[row] if row < len(each) else None
                for each in waiting
                for row in range(call * joining, (call + 1) * joining)
            ]
            for call in range(calls)
        ]

    def _places(self, group: Sequence[int | None]) -> Int[np.ndarray, "shards joining"]:
        """The slots of one of `_groups` as `insert_rows` takes them."""
        size = self.shape.batch // self._shards
        slots = [size if slot is None else slot % size for slot in group]
        return np.array(slots, np.int32).reshape(self._shards, -1)

    @property
    def _rounds(self) -> Rounds:
        assert self._rows is not None, "no row has entered yet"
        programs = self._programs
        return Rounds(
            programs.compiler,
            programs.target,
            programs.drafter,
            programs.strategy,
            self._rows_shape,
            self._rows.sampling,
        )

    def advance(self, max_rounds: int, min_running: int = 1) -> None:
        """Decodes at most `max_rounds` rounds, and none with less than `min_running` rows."""
        rounds, watched = self._rounds, self._on_draft is not None
        grammars = [
            None if slot not in self._running or request is None else request.grammar
            for slot, request in enumerate(self._requests)
        ]
        advance = rounds.decode
        if self._host is not None or watched or any(grammars):
            advance = HostRounds(rounds, grammars, self._host, self._on_draft).advance
        with self._measured("decode"):
            if self._profiler is None:
                state = advance(self.state, max_rounds, min_running)
            else:
                state = self._profiler.advance(
                    self._key, self.state, max_rounds, min_running, advance
                )
            self.state = jax.block_until_ready(state)
        self._end([slot for slot in sorted(self._running) if self.view.finish[slot] != RUNNING])

    def use(self, features: SamplingFeatures) -> None:
        """Decodes from now on with these steps of sampling, which all running rows need."""
        self.shape = dataclasses.replace(self.shape, features=features)
        if self._rows is not None:
            self._rows = self._rows.with_features(features)
            self._rows_shape = dataclasses.replace(self._rows_shape, features=features)

    def compile_rounds(self) -> None:
        """Has its rounds compiled by a compiler whose programs run nothing."""
        self._rounds.decode(self.state, 1)

    def stop(self, slots: Sequence[int]) -> None:
        """Ends rows that only the host knows to have ended, such as by a stop string."""
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

        Its share of the call that read its prompt, the rounds since it entered, and all compilation
        since the batch was made.
        """
        began = self._began[slot]
        return Seconds(began.prefill, self.seconds.decode - began.decode, self.seconds.compile)

    @contextlib.contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        """Adds the time taken to `seconds`, without compilation."""
        compiler = self._programs.compiler
        begin, compiled = time.perf_counter(), compiler.seconds
        yield
        taken, compiled = time.perf_counter() - begin, compiler.seconds - compiled
        parts = {name: getattr(self.seconds, name) + taken - compiled}
        self.seconds = self.seconds._replace(compile=self.seconds.compile + compiled, **parts)
