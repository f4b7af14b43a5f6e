"""A batch that is being decoded, as the host sees it: rows enter its slots and leave them."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Int

from spec_jax import distributed
from spec_jax.decoding.state import ERROR, RUNNING, STOP, DecodeState
from spec_jax.drafters.base import Draft
from spec_jax.engine.batch_shape import BatchShape, power_of_two, tokens_between_rounds
from spec_jax.engine.cost_profiling import CostProfiler, Load
from spec_jax.engine.host_rounds import HostRounds
from spec_jax.engine.prefill_queue import Prefill, PrefillQueue, rows_read_together
from spec_jax.engine.programs import Compiler
from spec_jax.engine.requests import Request
from spec_jax.engine.rounds import Rounds
from spec_jax.engine.rows import DeviceRows, RowPrograms
from spec_jax.engine.slots import NO_TEXT, Slot
from spec_jax.engine.universal_text import UniversalText
from spec_jax.engine.view import Seconds, View
from spec_jax.sampling.parameters import SamplingFeatures


class Batch:
    """A batch being decoded, and the host's latest copy of it.

    A row's cache does not depend, to the last bit, on when it enters or on which rows enter with
    it, as long as the same number of rows is read by a call.

    A slot keeps the text and the cache of its last request. A prompt that begins like the text of a
    slot of its shard copies that cache, in whole blocks, and reads only the rest, in the blocks in
    which it would be read alone.

    Args:
      programs: make rows and move them.
      shape: of the batch; it may `grow`.
      together: rows whose prompts are read by one call, a multiple of the shards; by
        default, and after the first ones, as many as pays while other rows decode.
      host: makes what drafts on the host, if the method does.
      profiler: measures what an adaptive policy's rounds cost.

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
        host: Callable[[Compiler, BatchShape], UniversalText] | None = None,
        profiler: CostProfiler | None = None,
    ):
        self.shape, self.seconds = shape, Seconds()
        self._programs, self._profiler = programs, profiler
        self._together = together
        self._host = None if host is None else host(programs.compiler, shape)
        self._slots = [Slot() for _ in range(shape.batch)]
        self._num_entries = 0
        self._prefills = PrefillQueue(programs, self._shards)
        self._running: set[int] = set()
        self._rows: DeviceRows | None = None
        self._rows_shape = shape
        self._load_of_costs: Load | None = None
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
        return self._prefills.shape(self.shape, self.together)

    def grow(self, shape: BatchShape) -> dict[int, int]:
        """Makes room for other rows; the device follows when the next ones enter.

        Args:
          shape: at least the batch's own in everything but features.

        Returns:
          The new number of each slot.
        """
        size, larger = (each.batch // self._shards for each in (self.shape, shape))
        if self._rows is None:
            size = larger
        moved = {slot: slot // size * larger + slot % size for slot in range(self.shape.batch)}
        slots = [Slot() for _ in range(shape.batch)]
        for old, new in moved.items():
            slots[new] = self._slots[old]
        self._slots, self._running = slots, {moved[slot] for slot in self._running}
        if not self._running and shape.of_rows != self.shape.of_rows:
            self._forget_texts()  # the rows that run are copied, and no other
        if self._host is not None:
            self._host.grow(shape, moved)
        self.shape, self._view, self._together = shape, None, None
        return moved

    def _forget_texts(self) -> None:
        for slot in self._slots:
            slot.hold()

    def choose_slots(self, requests: Sequence[Request], free: Sequence[int]) -> dict[int, Request]:
        """A slot for each request, out of at least as many free ones.

        It is the slot whose text begins like the prompt, otherwise the one that was taken first.
        """
        left, chosen = sorted(free, key=lambda slot: self._slots[slot].entry), {}
        for request in requests:
            slot = max(left, key=self._num_shared(request).__getitem__)
            left.remove(slot)
            chosen[slot] = request
        return chosen

    def shares_prefix(self, requests: Sequence[Request]) -> bool:
        """Whether a request's prompt begins like the text of a slot."""
        return any(any(self._num_shared(request)) for request in requests)

    def _num_shared(self, request: Request) -> list[int]:
        """How many tokens of its prompt a request may copy from each slot."""
        if self._rows is not None and self._programs.copies_prefix(request):
            block = self.prefill_shape.block if self._rows.state.cache.can_truncate else None
            if block is None or block < len(request.prompt_token_ids):
                return [slot.num_shared(request, block) for slot in self._slots]
        return [0] * self.shape.batch

    @property
    def reading(self) -> dict[int, int]:
        """The slots whose prompts are being read, and how many tokens were computed or copied."""
        return self._prefills.num_computed_tokens

    def insert(self, requests: Mapping[int, Request], *, by_chunks: bool = False) -> None:
        """Reads the prompts of requests and puts their rows into slots that have none running.

        Args:
          requests: by slot. All fit the batch's shape.
          by_chunks: leaves the reading to `read_chunks`.
        """
        if self._profiler is not None:
            num_running = len(self._running.union(self._prefills.num_computed_tokens, requests))
            load = self._load(num_running)
            may_draft = self._profiler.expects_drafts(load, [*requests.values()], num_running)
            requests = {
                slot: dataclasses.replace(each, may_draft=may_draft and each.may_draft)
                for slot, each in requests.items()
            }
        self._prefills.add(requests, self.shape, self.together)
        for slot in requests:
            self._num_entries += 1
            self._slots[slot].entry = self._num_entries
        while self._prefills and not by_chunks:
            self._read(self._prefills.next(), to_end=True)
        self._together = None  # later ones enter beside rows that decode

    def read_chunks(self, *, to_end: bool) -> None:
        """Reads what prompts may be read between two rounds.

        That is one block of a long prompt, or several short prompts of as many tokens together.
        With `to_end`, and if no row runs, prompts are read to their ends.
        """
        limit = num_left = tokens_between_rounds(self._programs.target.platform)
        while self._prefills:
            prefill, waits = self._prefills.next(), bool(self._running) or not to_end
            num_tokens = prefill.shape.block * prefill.shape.batch // self._shards
            if waits and num_left < min(num_tokens, limit):
                return
            self._read(prefill, to_end=not waits)
            num_left -= num_tokens

    def _read(self, prefill: Prefill, *, to_end: bool) -> None:
        """Reads the prompts of a group; its rows enter at the end."""
        before = self.seconds.prefill
        with self._measured("prefill"):
            if prefill.rows is None:
                self._begin(prefill, to_end)
            prefill.read(self._programs, to_end=to_end)
            if not prefill.num_chunks:
                self._prefills.finish(prefill)
                self._enter(prefill)
        prefill.seconds += self.seconds.prefill - before
        slots = [slot for slot in prefill.group if slot is not None]
        for slot in slots:
            self._slots[slot].began = self.seconds._replace(prefill=prefill.seconds / len(slots))
        if self._profiler is not None and not prefill.num_chunks:
            num_copied = sum(self._slots[slot].num_cached_tokens for slot in slots)
            self._profiler.record_reading(prefill.requests, num_copied, prefill.seconds)

    def _begin(self, prefill: Prefill, to_end: bool) -> None:
        """Makes the rows of a group with what they copy, unless one program reads all of it."""
        slots, num_tokens = self._sources(prefill)
        prefill.num_computed = num_tokens
        for slot, count in zip(prefill.group, num_tokens.tolist(), strict=True):
            if slot is not None:
                self._slots[slot].num_cached_tokens = count
        copies = num_tokens.any()
        if not copies and (to_end or prefill.num_chunks <= 1):
            return
        programs, shape = self._programs, prefill.shape
        prefill.rows = programs.start(prefill.requests, shape)
        self._make_room(prefill.rows)
        if copies:
            assert self._rows is not None
            shapes = shape, self.shape
            prefill.rows = programs.copy_prefix(prefill.rows, self._rows, shapes, slots, num_tokens)

    def _sources(
        self, prefill: Prefill
    ) -> tuple[Int[np.ndarray, "shards joining"], Int[np.ndarray, " rows"]]:
        """The slot of its shard whose text each row begins with, and how many tokens of it."""
        size, joining = self.shape.batch // self._shards, len(prefill.group) // self._shards
        slots, num_tokens = np.zeros((2, len(prefill.group)), np.int32)
        for row, request in enumerate(prefill.requests):
            first = row // joining * size
            counts = self._num_shared(request)[first : first + size]
            slots[row], num_tokens[row] = np.argmax(counts), max(counts)
        return slots.reshape(self._shards, joining), num_tokens

    def _enter(self, prefill: Prefill) -> None:
        """Puts rows whose prompts are read into their slots."""
        programs, shape, group, rows = self._programs, self.shape, prefill.group, prefill.rows
        assert rows is not None
        if self._profiler is not None:
            rows = dataclasses.replace(rows, state=self._profiler.begin(self._load(), rows.state))
        in_order = all(slot in (None, at) for at, slot in enumerate(group))
        fills_batch = in_order and len(group) == shape.batch
        if fills_batch and not self._running:
            self._rows = rows  # nothing else is in the batch
            self._forget_texts()
        else:
            self._make_room(rows)
            assert self._rows is not None
            self._rows = programs.insert(self._rows, shape, self._places(group), rows)
        for slot, request in zip(group, prefill.requests, strict=True):
            if slot is not None:
                record = self._slots[slot]
                record.request = request
                record.hold(np.array(request.prompt_token_ids, np.int32))
                if len(record.text) < request.max_length:
                    self._running.add(slot)
        self._rows_shape, self._view = shape, None
        if self._host is not None:
            self._host.insert(group, prefill.requests, self._places(group))
        jax.block_until_ready(self._rows.state)

    def _make_room(self, rows: DeviceRows) -> None:
        """Gives the device's batch the shape that the host has decided on."""
        programs, shape, shards = self._programs, self.shape, self._shards
        before, self._rows_shape, self._view = self._rows_shape, shape, None
        if self._rows is None or not self._running:
            if self._rows is None or before.of_rows != shape.of_rows:
                self._rows = programs.empty(rows, shape, shards)
        elif before.of_rows != shape.of_rows:
            requests = [slot.request for slot in self._slots]
            self._rows = programs.grow(self._rows, requests, (before, shape), rows, shards)
        else:
            self._rows = self._rows.with_features(shape.features)
            return
        self._load_of_costs = None

    def _load(self, num_running: int | None = None) -> Load:
        """What decides how long rounds take, with the rows that run, or with `num_running`."""
        running = len(self._running) if num_running is None else num_running
        return Load(self.shape.of_rounds, power_of_two(running))

    def _places(self, group: Sequence[int | None]) -> Int[np.ndarray, "shards joining"]:
        """The slots of rows that are read together as `insert_rows` takes them."""
        size = self.shape.batch // self._shards
        slots = [size if slot is None else slot % size for slot in group]
        return np.array(slots, np.int32).reshape(self._shards, -1)

    @property
    def _rounds(self) -> Rounds:
        assert self._rows is not None, "no row has entered yet"
        return Rounds(self._programs, self._rows_shape, self._rows.sampling)

    def advance(
        self,
        max_rounds: int,
        min_running: int = 1,
        on_draft: Callable[[Draft], None] | None = None,
    ) -> None:
        """Decodes at most `max_rounds` rounds, and none with less than `min_running` rows.

        `on_draft` gets each round's draft before it is verified, which takes two programs a round.
        """
        rounds = self._rounds
        grammars = [
            None if at not in self._running or slot.request is None else slot.request.grammar
            for at, slot in enumerate(self._slots)
        ]
        advance = rounds.decode
        if self._host is not None or on_draft is not None or any(grammars):
            advance = HostRounds(rounds, grammars, self._host, on_draft).advance
        with self._measured("decode"):
            if self._profiler is None:
                state = advance(self.state, max_rounds, min_running)
            else:
                load = self._load()
                if load != self._load_of_costs:
                    self.state = self._profiler.with_costs(load, self.state)
                    self._load_of_costs = load
                state = self._profiler.advance(load, self.state, max_rounds, min_running, advance)
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
        self._prefills.remove(slots)
        slots = [slot for slot in slots if slot in self._running]
        if not slots:
            return
        self._end(slots)
        finish = self.view.finish.copy()
        finish[slots] = STOP
        sharding = self.state.finish.sharding
        ended = jax.make_array_from_callback(finish.shape, sharding, lambda part: finish[part])
        self.state = dataclasses.replace(self.state, finish=ended)

    def _end(self, slots: Sequence[int]) -> None:
        """Records rows that have finished."""
        if self._profiler is not None and slots:
            self._profiler.record(self._load(), self.state, slots)
        self._running.difference_update(slots)
        view = self.view
        for slot in slots:
            text = view.tokens[slot, : view.lengths[slot]]
            self._slots[slot].hold(NO_TEXT if view.finish[slot] == ERROR else text)

    @property
    def view(self) -> View:
        """The current state, copied to the host when first needed."""
        if self._view is None:
            state = self.state
            seen = (state.tokens, state.lengths, state.finish, state.counters, state.logprobs)
            self._view = View(*distributed.to_host(seen))
        return self._view

    def num_cached_tokens(self, slot: int) -> int:
        """How many tokens of its prompt the request in a slot has copied."""
        return self._slots[slot].num_cached_tokens

    @property
    def running(self) -> bool:
        """Whether any row still decodes."""
        return bool(self._running)

    def seconds_of(self, slot: int) -> Seconds:
        """The time that the request in a slot took so far.

        Its share of the call that read its prompt, the rounds since it entered, and all compilation
        since the batch was made.
        """
        began = self._slots[slot].began
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
