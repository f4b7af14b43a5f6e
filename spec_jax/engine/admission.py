"""How requests enter a batch: their prompts are read separately, and the rows join it."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from spec_jax.config import SamplingParams
from spec_jax.decoding import loop
from spec_jax.decoding.draft_length import DraftLengthPolicy
from spec_jax.decoding.state import DecodeState
from spec_jax.drafters.base import Drafter
from spec_jax.engine.programs import EMPTY, JOIN, PREFILL, Compiler, shardings
from spec_jax.engine.requests import Bucket, Request, pad
from spec_jax.models.model import Model
from spec_jax.sampling.parameters import BatchSampling, Room, SamplingFeatures
from spec_jax.sharding.rows import join_rows

PADDING = Request([0], SamplingParams(max_tokens=1), np.zeros((2,), np.uint32), (), max_length=1)
"""Fills a slot without a request; it has finished before the first round."""

Inputs = Callable[[Sequence[Request], Bucket], Any]
"""A drafter's inputs from the host: arrays with one entry for each row of the bucket."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """Requests whose prompts have been read, ready to join a batch.

    Attributes:
      state: the loop's state of them alone.
      sampling: their parameters.
    """

    state: DecodeState
    sampling: BatchSampling


def _without_features(rows: Rows) -> Rows:
    """The same rows for programs that move them and sample nothing: one for all features."""
    sampling = dataclasses.replace(rows.sampling, features=SamplingFeatures())
    return dataclasses.replace(rows, sampling=sampling)


@dataclasses.dataclass(frozen=True)
class Reader:
    """Compiles and runs the reading of prompts.

    Attributes:
      compiler: compiles the programs.
      target: the target model.
      drafter: the drafter, which reads the prompts too.
      policy: the draft-length policy.
      inputs: makes the drafter's inputs from the host.
      headroom: of the target's cache, for a width that prompts are read in.
      keep_states: whether the target's hidden states are kept.
    """

    compiler: Compiler
    target: Model
    drafter: Drafter
    policy: DraftLengthPolicy
    inputs: Inputs
    headroom: Callable[[int], int]
    keep_states: bool = False

    def program(
        self, requests: Sequence[Request], bucket: Bucket
    ) -> tuple[jax.stages.Compiled, tuple]:
        """The compiled prefill, and its arguments for these requests."""
        put = self.compiler.put
        arrays, inputs = put(pad(requests, bucket)), put(self.inputs(requests, bucket))
        args = (self.target, self.drafter, arrays, inputs)
        static = (bucket.block, bucket.logprobs, bucket.prompt_logprobs)
        return self.compiler.program((PREFILL, bucket), self._start, args, static), args

    def _start(
        self,
        target: Model,
        drafter: Drafter,
        arrays: dict,
        inputs: Any,
        block: int,
        logprobs: int | None,
        prompt_logprobs: bool,
    ) -> DecodeState:
        return loop.start(
            target,
            drafter,
            self.policy,
            block=block,
            headroom=self.headroom(block),
            inputs=inputs,
            keep_states=self.keep_states,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            **arrays,
        )


class Admission:
    """Reads the prompts of one bucket, and puts their rows into slots.

    Args:
      reader: reads prompts.
      bucket: the shapes of the batch.
      together: rows whose prompts are read by one call, a multiple of `shards`.
      shards: of the batch; a row is read by the shard that holds its slot.
      room: for stop tokens and bad words, of all requests that may ever join.
    """

    def __init__(self, reader: Reader, bucket: Bucket, together: int, shards: int, room: Room):
        self.bucket, self.together = bucket, together
        self._reader, self._shards, self._room = reader, shards, room
        self._compiler = reader.compiler

    def key(self, rows: Rows) -> Hashable:
        """Everything that decides the shapes of the rounds of a batch of such rows."""
        leaves, structure = jax.tree.flatten((rows.state, rows.sampling))
        return self.bucket.batch, structure, tuple(leaf.shape[1:] for leaf in leaves)

    def slots(self, count: int) -> list[int]:
        """Which slots to use for `count` rows: about as many of each shard."""
        size = self.bucket.batch // self._shards
        return sorted(range(self.bucket.batch), key=lambda slot: (slot % size, slot))[:count]

    def is_whole(self, group: Sequence[int | None]) -> bool:
        """Whether one call reads all slots of the batch, each row in its own slot."""
        whole = len(group) == self.bucket.batch
        return whole and all(slot in (None, at) for at, slot in enumerate(group))

    def groups(self, slots: Sequence[int]) -> list[list[int | None]]:
        """The slots in lists, one for each call that reads prompts.

        Each list has an entry for each row of the call: its slot, or None for padding.
        """
        size, joining = self.bucket.batch // self._shards, self.together // self._shards
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

    def places(self, group: Sequence[int | None]) -> Int[np.ndarray, "shards joining"]:
        """The slots of one of `groups` as `join_rows` takes them."""
        size = self.bucket.batch // self._shards
        slots = [size if slot is None else slot % size for slot in group]
        return np.array(slots, np.int32).reshape(self._shards, -1)

    def read(self, requests: Sequence[Request]) -> Rows:
        """Reads the prompts of `together` requests."""
        bucket = dataclasses.replace(self.bucket, batch=self.together)
        prefill, args = self._reader.program(requests, bucket)
        return Rows(prefill(*args), self.sampling(requests, self.together))

    def empty(self, rows: Rows) -> Rows:
        """A batch of free slots only, sharded like `rows`."""
        args, static = (rows.state,), (self._shards, self.bucket.batch)
        program = self._compiler.program(
            (EMPTY, (self.key(_without_features(rows)), self.together)),
            functools.partial(loop.vacant, self._reader.policy),
            args,
            static,
            out_shardings=shardings(rows.state),
        )
        return Rows(program(*args), self.sampling([], self.bucket.batch))

    def join(self, batch: Rows, group: Sequence[int | None], rows: Rows) -> Rows:
        """Puts rows into the slots of one of `groups`; the batch's buffers are overwritten."""
        features = batch.sampling.features
        batch, rows = _without_features(batch), _without_features(rows)
        args = (
            self._reader.drafter,
            (batch.state, batch.sampling),
            self.places(group),
            (rows.state, rows.sampling),
        )
        key = (JOIN, (self.key(batch), self.together))
        join = self._compiler.program(
            key, self._join, args, donate=(1,), out_shardings=shardings(args[1])
        )
        state, sampling = join(*args)
        return Rows(state, dataclasses.replace(sampling, features=features))

    def _join(
        self,
        drafter: Drafter,
        batch: tuple[DecodeState, BatchSampling],
        slots: Int[jax.Array, "shards joining"],
        rows: tuple[DecodeState, BatchSampling],
    ) -> tuple[DecodeState, BatchSampling]:
        state = loop.join(drafter, self._reader.policy, batch[0], slots, rows[0])
        return state, join_rows(batch[1], slots, rows[1])

    def sampling(self, requests: Sequence[Request], batch: int) -> BatchSampling:
        """The parameters of requests and of padding after them, as arrays of `batch` rows."""
        padded = [*requests, *[PADDING] * (batch - len(requests))]
        return self._compiler.put(
            BatchSampling.stack(
                [request.sampling for request in padded],
                self._compiler.vocab_size,
                [request.stop_token_ids for request in padded],
                [request.bad_words for request in padded],
                self._room,
                [request.timestamps for request in padded],
                self._compiler.placement,
            )
        )
