"""Runs batches on the device: pads them into buckets, compiles once per bucket, keeps the time."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from spec_jax.batch import Batch
from spec_jax.config import SamplingParams
from spec_jax.decoding import loop
from spec_jax.decoding.adaptive import Adaptive
from spec_jax.decoding.lookahead import Lookahead
from spec_jax.decoding.processors import BatchSampling
from spec_jax.decoding.score import entries_per_round
from spec_jax.decoding.state import DecodeState
from spec_jax.drafters.base import Draft, Drafter
from spec_jax.grammar import Grammar
from spec_jax.host_rounds import HostDrafter, HostRounds
from spec_jax.models.model import Model
from spec_jax.pacing import Pacer
from spec_jax.programs import DECODE, PREFILL, Compiler, Rounds

MIN_CAPACITY = 256
MIN_BLOCK, MAX_BLOCK = 32, 512


@dataclasses.dataclass(frozen=True)
class Request:
    """One row of a batch: token ids, how to sample them, and what ends them.

    Attributes:
      prompt_token_ids: the prompt.
      sampling: how to sample.
      key: the row's randomness, as PRNG key data.
      stop_token_ids: what ends it.
      max_length: tokens at which it must end, the prompt's included.
      bad_words: token sequences that must not come up.
      grammar: what the output must follow; it advances with the row, so it is one request's own.
    """

    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    key: np.ndarray
    stop_token_ids: Sequence[int]
    max_length: int
    bad_words: Sequence[Sequence[int]] = ()
    grammar: Grammar | None = None


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The static shapes of a batch; requests of one bucket share compiled programs.

    Attributes:
      batch: rows, a power of two, or the next multiple of the layout's ways to share them.
      capacity: tokens a row has room for, K + 1 past its end included: a power of two, or the
        whole context.
      block: width that prompts are read in, a power of two.
      stops: stop tokens a row has room for.
    """

    batch: int
    capacity: int
    block: int
    stops: int


def _power_of_two(least: int, low: int = 1) -> int:
    return max(low, 1 << (least - 1).bit_length() if least > 1 else 1)


class Engine:
    """Compiled prefill and decode programs of one target, drafter and set of static choices."""

    def __init__(
        self,
        target: Model,
        drafter: Drafter,
        lookahead: Lookahead,
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
        self.strategy = loop.Strategy(lookahead, verification, scoring)
        self.max_model_len = max_model_len
        self.pacer = Pacer(lookahead) if isinstance(lookahead, Adaptive) else None
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
        capacity = min(_power_of_two(longest, MIN_CAPACITY), whole)
        prompt = max(len(request.prompt_token_ids) for request in requests)
        ways = 1 if self.target.placement is None else self.target.placement.ways("batch")
        return Bucket(
            batch=-(-_power_of_two(len(requests)) // ways) * ways,
            capacity=capacity,
            block=min(_power_of_two(prompt - 1, MIN_BLOCK), MAX_BLOCK),
            stops=_power_of_two(max(len(request.stop_token_ids) for request in requests), 4),
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
        if self.pacer is not None:
            state = self.pacer.begin(key, state)
            advance = functools.partial(self.pacer.advance, key, advance=advance)
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
        arrays = self.compiler.put(_pad(requests, bucket))
        inputs = self.compiler.put(self.inputs(requests, bucket))
        args = (self.target, self.drafter, arrays, inputs)
        return self.compiler.program((PREFILL, bucket), self._start, args, (bucket.block,)), args

    def memory(self) -> tuple[int, int]:
        """(bytes of weights and caches, bytes that the largest decoding program takes in all)."""
        return self.compiler.memory(DECODE)

    def _start(
        self, target: Model, drafter: Drafter, arrays: dict, inputs: Any, block: int
    ) -> DecodeState:
        return loop.start(
            target,
            drafter,
            self.strategy.lookahead,
            block=block,
            inputs=inputs,
            keep_states=self._keep_states,
            **arrays,
        )


def _pad(requests: Sequence[Request], bucket: Bucket) -> dict[str, np.ndarray]:
    """Left-aligned arrays of the requests; padding rows hold one token and start finished."""
    tokens = np.zeros((bucket.batch, bucket.capacity), np.int32)
    lengths = np.ones((bucket.batch,), np.int32)
    max_lengths = np.ones((bucket.batch,), np.int32)
    stops = np.full((bucket.batch, bucket.stops), -1, np.int32)
    keys = np.zeros((bucket.batch, 2), np.uint32)
    for row, request in enumerate(requests):
        ids = request.prompt_token_ids
        tokens[row, : len(ids)] = ids
        lengths[row], max_lengths[row] = len(ids), request.max_length
        stops[row, : len(request.stop_token_ids)] = request.stop_token_ids
        keys[row] = request.key
    return {
        "tokens": tokens,
        "lengths": lengths,
        "max_lengths": max_lengths,
        "stop_token_ids": stops,
        "keys": keys,
    }
