"""The compiled programs that make rows and move them: prefill, empty, grow, insert."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from spec_jax.decoding import loop, prefill
from spec_jax.decoding.logprobs import Logprobs
from spec_jax.decoding.rows import insert_rows, lengthened_rows, take_rows
from spec_jax.decoding.score import headroom
from spec_jax.decoding.state import DecodeState
from spec_jax.drafters.base import Drafter
from spec_jax.engine.batch_shape import BatchShape
from spec_jax.engine.programs import (
    CHUNK,
    COPY,
    EMPTY,
    GROW,
    INSERT,
    PREFILL,
    START,
    Compiler,
    Program,
)
from spec_jax.engine.requests import PADDING, Request, pad
from spec_jax.models.model import Model
from spec_jax.sampling.parameters import BatchSampling, SamplingFeatures

HostInputs = Callable[[Sequence[Request], BatchShape], Any]
"""A drafter's inputs from the host: arrays with one entry for each row of the shape."""


@dataclasses.dataclass(frozen=True)
class DeviceRows:
    """Rows on the device: the loop's state, and their sampling parameters."""

    state: DecodeState
    sampling: BatchSampling

    def with_features(self, features: SamplingFeatures) -> "DeviceRows":
        """The same rows for programs of other steps of sampling; moving rows needs none."""
        sampling = dataclasses.replace(self.sampling, features=features)
        return dataclasses.replace(self, sampling=sampling)


@dataclasses.dataclass(frozen=True)
class RowPrograms:
    """Makes rows and moves them with compiled programs.

    Attributes:
      compiler: compiles the programs.
      target: the target model.
      drafter: the drafter, which reads the prompts too.
      strategy: how rounds are decoded.
      inputs: makes the drafter's inputs from the host.
    """

    compiler: Compiler
    target: Model
    drafter: Drafter
    strategy: loop.Strategy
    inputs: HostInputs

    def prefill(self, requests: Sequence[Request], shape: BatchShape) -> tuple[Program, tuple]:
        """The compiled reading of prompts, and its arguments for these requests."""

        def read(target: Model, drafter: Drafter, arrays: dict, inputs: Any) -> DecodeState:
            state = self._start(shape, target, drafter, arrays, inputs)
            return prefill.prefill(target, drafter, state, shape.block, shape.prompt_logprobs)

        args = self._arrays(requests, shape)
        return self.compiler.program((PREFILL, shape.of_prefill), read, args), args

    def _arrays(self, requests: Sequence[Request], shape: BatchShape) -> tuple:
        put = self.compiler.put
        arrays, inputs = put(pad(requests, shape)), put(self.inputs(requests, shape))
        return self.target, self.drafter, arrays, inputs

    def _start(
        self, shape: BatchShape, target: Model, drafter: Drafter, arrays: dict, inputs: Any
    ) -> DecodeState:
        strategy = self.strategy
        return prefill.start(
            target,
            drafter,
            strategy.draft_length,
            block=shape.block,
            headroom=headroom(shape.block, strategy.scoring, drafter.lookahead, drafter.num_drafts),
            inputs=inputs,
            logprobs=shape.logprobs,
            **arrays,
        )

    def read(self, requests: Sequence[Request], shape: BatchShape) -> DeviceRows:
        """Reads the prompts of `shape.batch` requests or fewer."""
        program, args = self.prefill(requests, shape)
        return DeviceRows(program(*args), self.sampling(requests, shape))

    def copies_prefix(self, request: Request) -> bool:
        """Whether a request may begin with what another row has computed."""
        is_recorded = request.sampling.prompt_logprobs is not None
        return self.drafter.copies_prefixes and request.source is None and not is_recorded

    def start(self, requests: Sequence[Request], shape: BatchShape) -> DeviceRows:
        """The rows of `shape.batch` requests or fewer, of whose prompts nothing is read."""

        def start(target: Model, drafter: Drafter, arrays: dict, inputs: Any) -> DecodeState:
            return self._start(shape, target, drafter, arrays, inputs)

        args = self._arrays(requests, shape)
        program = self.compiler.program((START, shape.of_prefill), start, args)
        return DeviceRows(program(*args), self.sampling(requests, shape))

    def copy_prefix(
        self,
        rows: DeviceRows,
        batch: DeviceRows,
        shapes: tuple[BatchShape, BatchShape],
        slots: Int[np.ndarray, "shards joining"],
        num_tokens: Int[np.ndarray, " joining"],
    ) -> DeviceRows:
        """Rows that begin with what the rows of a batch have computed.

        Args:
          rows: as `start` made them.
          batch: the batch.
          shapes: of the rows and of the batch.
          slots: the slot whose text each row begins with, counted within its shard.
          num_tokens: how many tokens of it; see `decoding.prefill.copy_prefix`.
        """

        def copy(drafter: Drafter, rows, batch, slots, num_tokens) -> DecodeState:
            # What a policy has counted is of other texts, and its costs are not of one row.
            others = take_rows(dataclasses.replace(batch, draft_length=None), slots)
            return prefill.copy_prefix(drafter, rows, others, num_tokens)

        args = (self.drafter, rows.state, batch.state, slots, self.compiler.put(num_tokens))
        key = (COPY, (shapes[0].of_prefill, shapes[1].of_rows))
        program = self.compiler.program(key, copy, args, donate=(1,), like=rows.state)
        return dataclasses.replace(rows, state=program(*args))

    def read_chunk(self, rows: DeviceRows, shape: BatchShape) -> DeviceRows:
        """Reads the next block of each prompt; the buffers of the rows are overwritten."""

        def read(target: Model, drafter: Drafter, state: DecodeState) -> DecodeState:
            return prefill.prefill_step(target, drafter, state, shape.block, shape.prompt_logprobs)

        args, key = (self.target, self.drafter, rows.state), (CHUNK, shape.of_prefill)
        program = self.compiler.program(key, read, args, donate=(2,), like=rows.state)
        return dataclasses.replace(rows, state=program(*args))

    def sampling(self, requests: Sequence[Request | None], shape: BatchShape) -> BatchSampling:
        """The parameters of requests, and of padding for None and after them, as arrays."""
        padded = [PADDING if each is None else each for each in requests]
        padded += [PADDING] * (shape.batch - len(padded))
        return self.compiler.put(
            BatchSampling.stack(
                [each.sampling for each in padded],
                self.compiler.vocab_size,
                [each.stop_token_ids for each in padded],
                [each.bad_words for each in padded],
                [each.timestamps for each in padded],
                self.compiler.placement,
                stops=shape.stops,
                words=shape.bad_words,
                features=shape.features,
            )
        )

    def empty(self, rows: DeviceRows, shape: BatchShape, shards: int) -> DeviceRows:
        """A batch of free slots only; sharded like `rows`, whose arrays may have less room."""

        def empty(rows: DecodeState) -> DecodeState:
            return self._empty(rows, shape, shards)

        key = (EMPTY, (shape.of_rows, *rows.state.tokens.shape))
        program = self.compiler.program(key, empty, (rows.state,), like=rows.state)
        return DeviceRows(program(rows.state), self.sampling([], shape))

    def _empty(self, rows: DecodeState, shape: BatchShape, shards: int) -> DecodeState:
        count, capacity = rows.tokens.shape
        if capacity < shape.capacity:
            full_shape = dataclasses.replace(shape, batch=count)
            arguments = (
                self.target,
                self.drafter,
                pad([], full_shape),
                self.inputs([PADDING], full_shape),
            )
            like = jax.eval_shape(functools.partial(self._start, full_shape), *arguments)
            rows = lengthened_rows(rows, like)
        return prefill.empty_batch(self.strategy.draft_length, rows, shards, shape.batch)

    def grow(
        self,
        batch: DeviceRows,
        requests: Sequence[Request | None],
        shapes: tuple[BatchShape, BatchShape],
        rows: DeviceRows,
        shards: int,
    ) -> DeviceRows:
        """A copy of a running batch with more room.

        Args:
          batch: the batch.
          requests: whose rows run in the slots of the larger batch.
          shapes: of the batch before and after.
          rows: read for the new shape, whose arrays may have less room for a row.
          shards: of the rows; each keeps its own ones, in its first slots.
        """
        before, after = shapes
        policy = self.strategy.draft_length

        def copied(state: DecodeState, rows: DecodeState) -> DecodeState:
            larger = self._empty(rows, after, shards)
            insert = functools.partial(prefill.insert, policy)
            return grown_rows(_with_logprobs(state, larger), larger, shards, insert)

        key = (GROW, (before.of_rows, after.of_rows, *rows.state.tokens.shape))
        args = (batch.state, rows.state)
        program = self.compiler.program(key, copied, args, like=rows.state)
        return DeviceRows(program(*args), self.sampling(requests, after))

    def insert(
        self,
        batch: DeviceRows,
        shape: BatchShape,
        slots: Int[np.ndarray, "shards joining"],
        rows: DeviceRows,
    ) -> DeviceRows:
        """Puts rows into slots of a batch, whose buffers are overwritten."""
        policy = self.strategy.draft_length

        def put(
            batch: tuple[DecodeState, BatchSampling],
            slots: Int[jax.Array, "shards joining"],
            rows: tuple[DecodeState, BatchSampling],
        ) -> tuple[DecodeState, BatchSampling]:
            state = prefill.insert(policy, batch[0], slots, rows[0])
            return state, insert_rows(batch[1], slots, rows[1])

        old, new = (each.with_features(SamplingFeatures()) for each in (batch, rows))
        args = ((old.state, old.sampling), slots, (new.state, new.sampling))
        key = (INSERT, (shape.of_rows, slots.size, rows.state.tokens.shape[1]))
        program = self.compiler.program(key, put, args, donate=(0,), like=args[0])
        state, sampling = program(*args)
        return DeviceRows(state, sampling).with_features(shape.features)


def _with_logprobs(state: DecodeState, like: DecodeState) -> DecodeState:
    """A state that has log-probabilities if `like` has them."""
    if state.logprobs is not None or like.logprobs is None:
        return state
    batch, length = state.tokens.shape
    zeros = Logprobs.zeros(batch, length, like.logprobs.top.shape[-1])
    return dataclasses.replace(state, logprobs=zeros)


def grown_rows(
    batch: Any, larger: Any, shards: int, insert: Callable[..., Any] = insert_rows
) -> Any:
    """A larger batch of free slots with the rows of a batch, which keep their shards.

    Arrays get longer at their ends. A ring is either as long as before, or a full cache that
    becomes a ring of at least as many slots: in both cases each token keeps its slot.

    Args:
      batch: arrays of one entry a row.
      larger: the free slots, in the same structure, with room for as much a row or more.
      shards: of the rows; the rows of each take its first slots.
      insert: inserts rows into slots of `larger`, as `insert_rows` does.
    """
    rows = lengthened_rows(batch, larger)
    size = len(jax.tree.leaves(batch)[0]) // shards
    slots = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (shards, size))
    return insert(larger, slots, rows)
