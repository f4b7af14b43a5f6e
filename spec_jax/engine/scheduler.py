"""Continuous batching: a slot is given to the next request as soon as its row has finished.

Everything is decided from the requests and from what the device has decoded, never from the time,
so that all processes of a run decide alike.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from spec_jax.decoding.state import RUNNING
from spec_jax.engine.detokenization import Row
from spec_jax.engine.engine import Engine
from spec_jax.engine.requests import Request
from spec_jax.outputs import StreamChunk

ROUNDS_PER_CALL = 64
"""Rounds between host exchanges when nobody waits for the text."""
ROUNDS_PER_CHUNK = 4
"""Rounds between host exchanges when streaming, or when the host looks for stop strings."""


class Scheduler:
    """Decodes requests in turn, as many at once as there are slots.

    All shapes are those that the largest of the requests needs, so that any of them fits any slot
    and nothing is compiled on the way.

    Args:
      engine: what decodes them.
      rows: the host's side of each request, in the order in which they are taken.
      slots: most requests decoded at once.
      rounds: most rounds of a step.
      learn: told each request's tokens once it has finished, failed ones left out.
    """

    def __init__(
        self,
        engine: Engine,
        rows: Sequence[Row],
        slots: int,
        rounds: int,
        learn: Callable[[Request, Sequence[int]], None],
    ):
        self._waiting, self._rounds, self._learn = deque(rows), rounds, learn
        self._running: dict[int, Row] = {}
        self._finished: list[Row] = []
        self._batch = engine.open([row.request for row in rows], slots)
        self._slots = self._batch.slots(slots)

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._waiting or self._running)

    def step(self) -> list[StreamChunk]:
        """Fills free slots, decodes on, and returns what is new.

        While requests wait, a step ends with the round in which a row finishes.
        """
        self._fill()
        rounds, min_running = self._rounds, 1
        if any(row.request.sampling.stop for row in self._running.values()):
            rounds = min(rounds, ROUNDS_PER_CHUNK)
        if self._waiting:
            min_running = len(self._running)
        self._batch.advance(rounds, min_running)
        chunks = list(self._collect())
        if not self.busy:
            self._learn_finished()
        return chunks

    def _fill(self) -> None:
        free = [slot for slot in self._slots if slot not in self._running]
        entering = {slot: self._waiting.popleft() for slot in free[: len(self._waiting)]}
        if entering:
            self._learn_finished()
            self._batch.insert({slot: row.request for slot, row in entering.items()})
            self._running.update(entering)

    def _learn_finished(self) -> None:
        """Before others join, and by rows: the rounds of a step then do not decide the order."""
        for row in sorted(self._finished, key=_place):
            self._learn(row.request, row.token_ids)
        self._finished.clear()

    def _collect(self) -> Iterator[StreamChunk]:
        """Hands each row its new tokens, and ends those whose stop string came up."""
        view, cut = self._batch.view, []
        for slot, row in sorted(self._running.items(), key=lambda item: _place(item[1])):
            known = len(row.request.prompt_token_ids) + len(row.token_ids)
            new = view.tokens[slot, known : view.lengths[slot]].tolist()
            text, new = row.take(new, int(view.finish[slot]))
            if row.finish_reason is None:
                if new:
                    yield StreamChunk(row.index, text, tuple(new), sample=row.sample)
                continue
            if view.finish[slot] == RUNNING:
                cut.append(slot)
            del self._running[slot]
            if row.finish_reason != "error":
                self._finished.append(row)
            output = row.output(slot, self._batch)
            yield StreamChunk(row.index, text, tuple(new), output, row.sample)
        if cut:
            self._batch.stop(cut)


def _place(row: Row) -> tuple[int, int]:
    return row.index, row.sample
