"""The prompts that are being read for the slots of a batch."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Int

from spec_jax.engine.batch_shape import SHORT_PROMPT, TOKENS_AT_ONCE, BatchShape, prompt_block
from spec_jax.engine.requests import PADDING, Request
from spec_jax.engine.rows import DeviceRows, RowPrograms


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


@dataclasses.dataclass
class Prefill:
    """Rows whose prompts are read by the same calls, apart from the batch that they will enter.

    Attributes:
      group: the slot of each row, or None for padding.
      requests: the request of each row.
      shape: in which the prompts are read.
      rows: the rows; None before anything is read.
      num_computed: tokens of each prompt that were read or copied.
      seconds: what reading took so far.
    """

    group: list[int | None]
    requests: list[Request]
    shape: BatchShape
    num_computed: Int[np.ndarray, " rows"]
    rows: DeviceRows | None = None
    seconds: float = 0.0

    @property
    def num_chunks(self) -> int:
        """Blocks that are left to read."""
        return -(-int((self._sizes - self.num_computed).max()) // self.shape.block)

    @property
    def _sizes(self) -> Int[np.ndarray, " rows"]:
        """Tokens to read; the first round reads the last token."""
        return np.array([len(each.prompt_token_ids) - 1 for each in self.requests])

    def read(self, programs: RowPrograms, *, to_end: bool) -> None:
        """Reads a block of each prompt, or all; one program reads all if nothing was copied."""
        shape, num_chunks = self.shape, self.num_chunks if to_end else min(1, self.num_chunks)
        if self.rows is None:
            self.rows = programs.read(self.requests, shape)
        else:
            for _ in range(num_chunks):
                self.rows = programs.read_chunk(self.rows, shape)
        jax.block_until_ready(self.rows.state.lengths)
        self.num_computed = np.minimum(self.num_computed + num_chunks * shape.block, self._sizes)


class PrefillQueue:
    """Prompts that are being read, in groups that the same calls read, in their order.

    Args:
      programs: read them.
      shards: of the batch's rows.
    """

    def __init__(self, programs: RowPrograms, shards: int):
        self._programs, self._shards = programs, shards
        self._queue: list[Prefill] = []
        self._turns = 0

    def __bool__(self) -> bool:
        return bool(self._queue)

    def next(self) -> Prefill:
        """The group that is read next.

        In turns it is the oldest one and the one with the fewest blocks left: so a short prompt
        waits for one block of a long one, and no group waits for ever.
        """
        self._turns += 1
        if self._turns % 2:
            return min(self._queue, key=lambda each: each.num_chunks)
        return self._queue[0]

    @property
    def num_computed_tokens(self) -> dict[int, int]:
        """How many tokens of each prompt were read or copied, by slot."""
        return {
            slot: count
            for each in self._queue
            for slot, count in zip(each.group, each.num_computed.tolist(), strict=True)
            if slot is not None
        }

    def shape(
        self, batch: BatchShape, together: int, requests: Sequence[Request] = ()
    ) -> BatchShape:
        """The shape in which `together` prompts of a batch are read.

        Short prompts that join a batch get no room for what they will generate: a few copied
        tokens take less time than a whole row.
        """
        target = self._programs.target
        # All blocks that a prompt may be read in, however long it is.
        fits = prompt_block(
            target.platform, 1 << 20, together // self._shards, target.config.embed_size
        )
        block = batch.ring_block or min(batch.block, fits)
        is_short = all(len(each.prompt_token_ids) <= SHORT_PROMPT for each in requests)
        has_predictions = any(each.prediction for each in requests)  # they lie at the end of a row
        capacity = batch.capacity
        if requests and is_short and not has_predictions and not batch.ring_block:
            capacity = min(capacity, SHORT_PROMPT)
        if together == batch.batch:
            capacity = batch.capacity  # the rows may become the batch
        return dataclasses.replace(batch, batch=together, block=block, capacity=capacity)

    def add(self, requests: Mapping[int, Request], batch: BatchShape, together: int) -> None:
        """Queues the prompts of requests.

        Args:
          requests: by slot.
          batch: the shape of their batch.
          together: rows of a group, a multiple of the shards.
        """
        size, joining = batch.batch // self._shards, together // self._shards
        waiting = [
            sorted(slot for slot in requests if slot // size == shard)
            for shard in range(self._shards)
        ]
        for begin in range(0, max(map(len, waiting)), joining):
            parts = (each[begin : begin + joining] for each in waiting)
            group = [slot for part in parts for slot in [*part, *[None] * (joining - len(part))]]
            entering = [PADDING if slot is None else requests[slot] for slot in group]
            num_computed = np.zeros((together,), np.int32)
            shape = self.shape(batch, together, entering)
            self._queue.append(Prefill(group, entering, shape, num_computed))

    def remove(self, slots: Sequence[int]) -> None:
        """Leaves out requests that were cancelled."""
        for each in self._queue:
            each.group = [None if slot in slots else slot for slot in each.group]
        self._queue = [each for each in self._queue if set(each.group) != {None}]

    def finish(self, prefill: Prefill) -> None:
        """Leaves out a group, once its rows have entered the batch."""
        self._queue = [each for each in self._queue if each is not prefill]
