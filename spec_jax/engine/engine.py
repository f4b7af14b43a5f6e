"""Runs batches on the device: pads them into buckets, compiles once per bucket, keeps the time."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from spec_jax.config import SamplingParams
from spec_jax.decoding import loop
from spec_jax.decoding.adaptive import Adaptive
from spec_jax.decoding.draft_length import DraftLengthPolicy
from spec_jax.decoding.score import entries_per_round
from spec_jax.decoding.state import DecodeState
from spec_jax.drafters.base import Draft, Drafter
from spec_jax.engine.batch import Batch
from spec_jax.engine.cost_profiling import CostProfiler
from spec_jax.engine.host_rounds import HostDrafter, HostRounds
from spec_jax.engine.programs import DECODE, PREFILL, Compiler, Rounds
from spec_jax.engine.requests import (
    MAX_BLOCK,
    MIN_BLOCK,
    MIN_CAPACITY,
    Bucket,
    Request,
    pad,
    power_of_two,
)
from spec_jax.models.model import Model
from spec_jax.sampling.parameters import BatchSampling


class Engine:
    """Compiled prefill and decode programs of one target, drafter and set of static choices."""

    def __init__(
        self,
        target: Model,
        drafter: Drafter,
        policy: DraftLengthPolicy,
        verification: str = "token",
        *,
        scoring: str = "block",
        max_model_len: int,
        inputs: Callable[[Sequence[Request], Bucket], Any] | None = None,
        host: HostDrafter | None = None,
        keep_states: bool = False,
        on_progress: Callable[[str], None] | None = None,
    ):
        self.target, self.drafter, self._keep_states = target, drafter, keep_states
        self.strategy = loop.Strategy(policy, verification, scoring)
        self.max_model_len = max_model_len
        self.cost_profiler = CostProfiler(policy) if isinstance(policy, Adaptive) else None
        self.inputs = inputs or (lambda requests, bucket: None)
        """What the drafter must be told about a batch: arrays of one entry a row."""
        self._host = host
        self.compiler = Compiler(target, on_progress)

    def bucket(self, requests: Sequence[Request]) -> Bucket:
        """The smallest bucket that holds the requests."""
        drafter = self.drafter
        reserve = entries_per_round(self.strategy.scoring, drafter.lookahead, drafter.drafts)
        # One throw-away entry beside a single bfloat16 row (see Model.score).
        longest = max(request.max_length for request in requests) + reserve + 1
        whole = -(-(self.max_model_len + reserve + 1) // MAX_BLOCK) * MAX_BLOCK
        capacity = min(power_of_two(longest, MIN_CAPACITY), whole)
        prompt = max(len(request.prompt_token_ids) for request in requests)
        num_shards = (
            1 if self.target.placement is None else self.target.placement.num_shards("batch")
        )
        return Bucket(
            batch=-(-power_of_two(len(requests)) // num_shards) * num_shards,
            capacity=capacity,
            block=min(power_of_two(prompt - 1, MIN_BLOCK), MAX_BLOCK),
            stops=power_of_two(max(len(request.stop_token_ids) for request in requests), 4),
        )

    def start(
        self, requests: Sequence[Request], on_draft: Callable[[Draft], None] | None = None
    ) -> Batch:
        """Reads the prompts; the batch then decodes with `Batch.advance`.

        Args:
          requests: one row each.
          on_draft: called with each round's draft before it is verified; rounds are then cut in
            two, which takes time.
        """
        bucket = self.bucket(requests)
        params = [request.sampling for request in requests]
        params += [SamplingParams(max_tokens=1)] * (bucket.batch - len(requests))
        sampling = self.compiler.put(
            BatchSampling.stack(
                params,
                self.target.config.vocab_size,
                [request.stop_token_ids for request in requests],
                [request.bad_words for request in requests],
            )
        )
        compiled_before = self.compile_seconds
        prefill, args = self.prefill(requests)
        begin = time.perf_counter()
        state = jax.block_until_ready(prefill(*args))
        drafts = None
        if self._host is not None:
            drafts = self._host.begin(self.compiler, requests, bucket)
        prefill_seconds = time.perf_counter() - begin
        key = (bucket.batch, bucket.capacity, bucket.stops, sampling.bad_words.shape)
        rounds = Rounds(self.compiler, (self.target, self.drafter), self.strategy, key, sampling)
        grammars = [request.grammar for request in requests]
        advance = rounds.decode
        if drafts is not None or on_draft is not None or any(grammars):
            advance = HostRounds(rounds, grammars, drafts, on_draft).advance
        if self.cost_profiler is not None:
            state = self.cost_profiler.begin(key, state)
            advance = functools.partial(self.cost_profiler.advance, key, advance=advance)
        return Batch(
            size=len(requests),
            state=state,
            _advance=advance,
            _compile_clock=lambda: self.compile_seconds,
            prefill_seconds=prefill_seconds,
            compile_seconds=self.compile_seconds - compiled_before,
        )

    @property
    def traces(self) -> int:
        """How many programs were traced so far: constant after warm-up inside a bucket."""
        return self.compiler.traces

    @property
    def compile_seconds(self) -> float:
        """Seconds spent compiling so far."""
        return self.compiler.seconds

    def prefill(self, requests: Sequence[Request]) -> tuple[jax.stages.Compiled, tuple]:
        """The compiled reading of prompts, and the arguments that these requests give it."""
        bucket = self.bucket(requests)
        arrays = self.compiler.put(pad(requests, bucket))
        inputs = self.compiler.put(self.inputs(requests, bucket))
        args = (self.target, self.drafter, arrays, inputs)
        return self.compiler.program((PREFILL, bucket), self._start, args, (bucket.block,)), args

    def _headroom(self, block: int) -> int:
        """Most KV slots that a call writes past a row's text: of a prompt's block, or a round."""
        drafter = self.drafter
        round_ = entries_per_round(self.strategy.scoring, drafter.lookahead, drafter.drafts)
        return max(block, round_ + 1)

    def memory(self) -> tuple[int, int]:
        """(bytes of weights and caches, bytes that the largest decoding program takes in all)."""
        return self.compiler.memory(DECODE)

    def _start(
        self, target: Model, drafter: Drafter, arrays: dict, inputs: Any, block: int
    ) -> DecodeState:
        return loop.start(
            target,
            drafter,
            self.strategy.draft_length,
            block=block,
            headroom=self._headroom(block),
            inputs=inputs,
            keep_states=self._keep_states,
            **arrays,
        )
