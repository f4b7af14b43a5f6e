"""Continuous batching: requests enter one running batch and leave it, a step at a time.

Everything is decided from the requests and from what the device has decoded, never from the time,
so that all processes of a run decide alike.
"""

import collections
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterable

import jax

from spec_jax.config import check_integer
from spec_jax.decoding.state import RUNNING
from spec_jax.engine.batch import Batch
from spec_jax.engine.batch_shape import NO_FEATURES, BatchShape
from spec_jax.engine.engine import Engine
from spec_jax.engine.requests import Request
from spec_jax.engine.sequence import Origin, Sequence
from spec_jax.engine.view import Seconds
from spec_jax.outputs import StreamChunk
from spec_jax.text.tokenizer import Tokenizer

ROUNDS_PER_STEP = 64
"""Rounds between host exchanges when nobody waits for the text."""
ROUNDS_PER_CHUNK, OF_LARGE_MODELS = 8, 2
"""Rounds between host exchanges when streaming, or when the host looks for stop strings: as many as
take a twentieth to a tenth of a second. An exchange takes some milliseconds."""
LARGE_BYTES = 2**28
"""Weights of a model whose rounds take that long on a CPU."""
FEATURE_STEPS = 64
"""Steps after which the rounds leave out steps of sampling that no running row needs."""

NO_ORIGIN = Origin()

OnFinished = Callable[[Request, list[int]], None]
"""Told each request's tokens once it has finished, failed and cancelled ones left out."""


class Scheduler:
    """Decodes requests in one running batch, in the order in which they are added.

    `add` and `cancel` may be called at any time, by any thread; `step` by one thread at a time.

    The batch starts with the smallest shape that holds the requests that wait, and grows when later
    ones need more. An idle batch stays for the prefixes of the next requests, until `release`.

    Args:
      engine: what decodes.
      max_num_seqs: most requests decoded at once.
      tokenizer: the target's; None if nobody reads the text.
      on_finished: called with each finished request and its tokens.
    """

    def __init__(
        self,
        engine: Engine,
        max_num_seqs: int,
        tokenizer: Tokenizer | None = None,
        on_finished: OnFinished | None = None,
    ):
        check_integer("max_num_seqs", max_num_seqs, 1)
        self.engine, self.max_num_seqs = engine, max_num_seqs
        engine.free_idle_batch = weakref.WeakMethod(self.release)
        self._tokenizer, self._on_finished = tokenizer, on_finished
        self.on_settle: Callable[[list[Sequence], list[int]], None] | None = None
        """Called with what a step adds and cancels, before it does."""
        self._weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.target))
        self._numbers = itertools.count()
        self._streaming: set[int] = set()
        self._arrived: collections.deque[Sequence] = collections.deque()
        self._cancelled: collections.deque[int] = collections.deque()
        self._seconds_before: dict[int, float] = {}
        self._chunks: list[tuple[int, StreamChunk]] = []
        self._forget()

    def _forget(self) -> None:
        self._waiting: collections.deque[Sequence] = collections.deque()
        self._running: dict[int, Sequence] = {}
        self._finished: list[Sequence] = []
        self._batch: Batch | None = None
        self._room: BatchShape | None = None
        """The shape that all requests need which were added since the batch was opened."""
        self._steps_unused = 0

    def add(self, request: Request, origin: Origin = NO_ORIGIN, *, streaming: bool = False) -> int:
        """Queues a request; returns its id.

        Args:
          request: what to decode.
          origin: where it comes from, for its result.
          streaming: whether somebody waits for the text as it comes.
        """
        number = next(self._numbers)
        if streaming:
            self._streaming.add(number)
        self._seconds_before[number] = self.engine.compile_seconds
        self._arrived.append(Sequence(number, request, origin, self._tokenizer))
        return number

    def cancel(self, number: int) -> None:
        """Ends a request at the begin of the next step, whose results have its `abort`."""
        self._cancelled.append(number)

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do or to return."""
        queues = (self._arrived, self._cancelled, self._waiting, self._running, self._chunks)
        return any(map(bool, queues))

    @property
    def num_running(self) -> int:
        """Requests in the running batch."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that were added and have not entered the batch."""
        return len(self._arrived) + len(self._waiting)

    @property
    def batch(self) -> Batch | None:
        """The running batch, or the idle one; None if there is none."""
        return self._batch

    def streams(self, number: int) -> bool:
        """Whether somebody waits for a request's text as it comes."""
        return number in self._streaming

    def step(self) -> list[tuple[int, StreamChunk]]:
        """Fills free slots, decodes some rounds, and returns what is new, with its request's id.

        The last chunk of a request has its output. While requests wait, a step ends with the round
        in which a row finishes.
        """
        self.settle()
        self._admit()
        if self._running:
            assert self._batch is not None
            # Whoever comes meanwhile should not wait for the end of a long prompt.
            self._batch.read_chunks(to_end=not self.engine.reserves_rows)
            self._drop_features()
            if num_decoding := len(self._running) - len(self._batch.reading):
                min_running = num_decoding if self._waiting else 1
                self._batch.advance(self._max_rounds(), min_running)
            self._collect()
        self._close_if_empty()
        chunks, self._chunks = self._chunks, []
        return chunks

    def settle(self) -> None:
        """Queues what was added and ends what was cancelled; decodes nothing."""
        # What is cancelled was added before, and others may add and cancel meanwhile.
        cancelled = [self._cancelled.popleft() for _ in range(len(self._cancelled))]
        arrived = [self._arrived.popleft() for _ in range(len(self._arrived))]
        if self.on_settle is not None:
            self.on_settle(arrived, cancelled)
        for sequence in arrived:
            self._waiting.append(sequence)
            if self._room is not None:
                self._room |= self.engine.plan([sequence.request])
        numbers = set(cancelled)
        if not numbers:
            return
        for sequence in [each for each in self._waiting if each.number in numbers]:
            self._waiting.remove(sequence)
            self._emit(sequence, sequence.abort())
        slots = [slot for slot, each in self._running.items() if each.number in numbers]
        for slot in slots:
            sequence = self._running.pop(slot)
            self._emit(sequence, sequence.abort(), slot)
        if slots:
            assert self._batch is not None
            self._batch.stop(slots)
        self._close_if_empty()

    def reset(self) -> None:
        """Forgets all requests, after a failure of the device."""
        self._arrived.clear()
        self._cancelled.clear()
        self._streaming.clear()
        self._seconds_before.clear()
        self._chunks.clear()
        self._forget()

    def _close_if_empty(self) -> None:
        if self._running or self._waiting:
            return
        self._report_finished()
        self._room = None

    def release(self) -> None:
        """Frees the memory of a batch in which nothing runs."""
        if not self._running and not self._waiting:
            self._batch = self._room = None

    def _admit(self) -> None:
        """Lets waiting requests enter free slots; the batch grows if they need more of them."""
        if not self._waiting or len(self._running) >= self.max_num_seqs:
            return
        rows = min(len(self._waiting) + len(self._running), self.max_num_seqs)
        if self._batch is not None and self._batch.reading:
            if not self.engine.reserves_rows:
                return  # their prompts would be read later anyway
            if self._shape(self._batch, rows).of_rows != self._batch.shape.of_rows:
                return  # prompts that are being read are for the batch as it is
        self._report_finished()
        if self._batch is None or self._room is None:
            self._batch = self._open(rows)
            self._room = self._batch.shape
        self._grow(self._batch, rows)
        slots = self._batch.slots(self.max_num_seqs)
        free = [slot for slot in slots if slot not in self._running]
        entering = [self._waiting.popleft() for _ in free[: len(self._waiting)]]
        if entering:
            chosen = self._batch.choose_slots([each.request for each in entering], free)
            running = [*self._running.values()]
            self._running.update(zip(chosen, entering, strict=True))
            if self.engine.reserves_rows:
                running += entering
            streaming = any(each.number in self._streaming for each in running)
            self._batch.insert(chosen, by_chunks=streaming)

    def _open(self, rows: int) -> Batch:
        """A batch for what waits: the idle one, if that saves reading or making room."""
        requests = [each.request for each in self._waiting]
        batch, self._batch = self._batch, None
        if batch is not None:
            shape = self.engine.plan(requests, rows)
            saves = self.engine.reserves_rows or batch.shares_prefix(requests)
            if batch.shape.of_rows == shape.of_rows and saves:
                batch.grow(shape)
                return batch
        return self.engine.open(requests, rows)

    def _grow(self, batch: Batch, rows: int) -> None:
        """Gives the batch the room that all its requests need, `rows` of them at a time."""
        shape = self._shape(batch, rows)
        if shape != batch.shape:
            moved = batch.grow(shape)
            self._running = {moved[slot]: each for slot, each in self._running.items()}
        self._room = shape

    def _shape(self, batch: Batch, rows: int) -> BatchShape:
        """A batch's shape with the room that all its requests need."""
        shape = batch.shape if self._room is None else self._room | batch.shape
        if rows > batch.shape.batch:
            shape = dataclasses.replace(shape, batch=self.engine.num_rows(rows))
        return dataclasses.replace(shape, features=self.engine.of_few_programs(shape.features))

    def _drop_features(self) -> None:
        """Leaves out steps of sampling that no row has needed for some time."""
        assert self._batch is not None and self._room is not None
        if self._batch.shape.features == NO_FEATURES:
            return
        needed = self.engine.features([each.request for each in self._running.values()])
        unused = needed != self._batch.shape.features
        self._steps_unused = self._steps_unused + 1 if unused else 0
        if self._steps_unused >= FEATURE_STEPS:
            self._steps_unused = 0
            waiting = self.engine.features([each.request for each in self._waiting])
            features = self.engine.of_few_programs(needed | waiting)
            self._room = dataclasses.replace(self._room, features=features)
            self._batch.use(needed)

    def _max_rounds(self) -> int:
        assert self._batch is not None
        if self._batch.reading:
            return 1  # the sooner a prompt is read, the fewer rounds decode few rows
        streams = {
            slot: each for slot, each in self._running.items() if each.number in self._streaming
        }
        if any(not streams[slot].token_ids for slot in streams.keys() - self._batch.reading.keys()):
            return 1  # a first token goes out at once, and whoever comes meanwhile enters soon
        if streams or any(each.request.sampling.stop for each in self._running.values()):
            return self._rounds_per_chunk
        return ROUNDS_PER_STEP

    @property
    def _rounds_per_chunk(self) -> int:
        target = self.engine.target
        is_large = target.platform == "cpu" and self._weight_bytes > LARGE_BYTES
        return min(ROUNDS_PER_CHUNK, OF_LARGE_MODELS) if is_large else ROUNDS_PER_CHUNK

    def _collect(self) -> None:
        """Hands each sequence its new tokens, and ends those whose stop string came up."""
        assert self._batch is not None
        reading, stopped = self._batch.reading, []
        for slot, count in reading.items():
            self._running[slot].num_computed_tokens = count
        decoding = self._running.keys() - reading.keys()
        if not decoding:
            return
        view = self._batch.view
        for slot, sequence in _by_number((slot, self._running[slot]) for slot in decoding):
            begin = len(sequence.request.prompt_token_ids) + len(sequence.token_ids)
            token_ids = view.tokens[slot, begin : view.lengths[slot]].tolist()
            chunk = sequence.append(token_ids, int(view.finish[slot]))
            if sequence.number in self._streaming:
                chunk = sequence.detailed(chunk, slot, view)
            if sequence.finish_reason is None:
                if chunk.token_ids:
                    self._chunks.append((sequence.number, chunk))
                continue
            if view.finish[slot] == RUNNING:
                stopped.append(slot)
            del self._running[slot]
            if sequence.finish_reason != "error":
                self._finished.append(sequence)
            self._emit(sequence, chunk, slot)
        if stopped:
            self._batch.stop(stopped)

    def _emit(self, sequence: Sequence, chunk: StreamChunk, slot: int | None = None) -> None:
        """Completes a sequence's last chunk."""
        number, batch = sequence.number, self._batch
        seconds, view = Seconds(), None
        if batch is not None and slot is not None and slot not in batch.reading:
            seconds, view = batch.seconds_of(slot), batch.view
            sequence.num_cached_tokens = batch.num_cached_tokens(slot)
        self._streaming.discard(number)
        compiled = self.engine.compile_seconds - self._seconds_before.pop(number)
        output = sequence.output(slot, view, seconds._replace(compile=compiled))
        self._chunks.append((number, dataclasses.replace(chunk, output=output)))

    def _report_finished(self) -> None:
        """Calls `on_finished` in the order of requests, whichever round finished first."""
        if self._on_finished is not None:
            for sequence in sorted(self._finished, key=lambda each: each.number):
                self._on_finished(sequence.request, sequence.token_ids)
        self._finished.clear()


def _by_number(items: Iterable[tuple[int, Sequence]]) -> list[tuple[int, Sequence]]:
    return sorted(items, key=lambda item: item[1].number)
