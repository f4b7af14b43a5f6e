"""Runs batches on the device: pads them into buckets, compiles once per bucket, keeps times."""

import dataclasses
from collections.abc import Callable, Sequence

import jax

from spec_jax.config import MAX_LOGPROBS
from spec_jax.decoding import loop
from spec_jax.decoding.adaptive import Adaptive
from spec_jax.decoding.draft_length import DraftLengthPolicy
from spec_jax.decoding.score import headroom, kv_slots_per_round
from spec_jax.drafters.base import Draft, Drafter
from spec_jax.engine.admission import Admission, Inputs, Reader
from spec_jax.engine.batch import Batch
from spec_jax.engine.cost_profiling import CostProfiler
from spec_jax.engine.host_rounds import HostDrafter
from spec_jax.engine.programs import DECODE, Compiler, Rounds
from spec_jax.engine.requests import (
    MAX_BLOCK,
    MIN_CAPACITY,
    Bucket,
    Request,
    power_of_two,
    prompt_block,
    source_shape,
)
from spec_jax.models.model import Model
from spec_jax.sampling.parameters import Room, SamplingFeatures, room_of

TOKENS_AT_ONCE = 256
"""Tokens that an accelerator reads in about the time of one, because it reads its weights once.

Prompts of joining rows are read together up to this many. On CPU the time grows with the tokens.
"""


def joining(platform: str, bucket: Bucket, shards: int) -> int:
    """Rows whose prompts are read by one call while others of the batch decode.

    Args:
      platform: of the target.
      bucket: the shapes of the batch, with the block of prompts that are read on their own.
      shards: of the batch's rows.
    """
    if platform == "cpu":
        return shards
    return min(bucket.batch, max(1, TOKENS_AT_ONCE // bucket.block) * shards)


class Engine:
    """Compiled prefill and decode programs of one target, drafter and set of static choices.

    Attributes:
      inputs: makes the drafter's inputs from the host.
    """

    def __init__(
        self,
        target: Model,
        drafter: Drafter,
        policy: DraftLengthPolicy,
        verification: str = "token",
        *,
        scoring: str = "block",
        scoring_consistent: bool = False,
        max_model_len: int,
        inputs: Inputs | None = None,
        host: HostDrafter | None = None,
        keep_states: bool = False,
        on_progress: Callable[[str], None] | None = None,
    ):
        self.target, self.drafter, self._keep_states = target, drafter, keep_states
        self.strategy = loop.Strategy(policy, verification, scoring, scoring_consistent)
        self.max_model_len = max_model_len
        self.cost_profiler = CostProfiler(policy) if isinstance(policy, Adaptive) else None
        self.inputs: Inputs = inputs or (lambda requests, bucket: None)
        self._host = host
        self.compiler = Compiler(target, on_progress)

    @property
    def _shards(self) -> int:
        """The number of shards of a batch's rows."""
        return self.target.placement.num_shards("batch")

    def bucket(self, requests: Sequence[Request], rows: int | None = None) -> Bucket:
        """The smallest bucket that holds the requests, `rows` of them at a time; all by default."""
        drafter, shards = self.drafter, self._shards
        reserve = kv_slots_per_round(self.strategy.scoring, drafter.lookahead, drafter.drafts)
        # One throw-away KV slot beside a single bfloat16 row (see Model.score).
        longest = max(request.max_length for request in requests) + reserve + 1
        whole = -(-(self.max_model_len + reserve + 1) // MAX_BLOCK) * MAX_BLOCK
        capacity = min(power_of_two(longest, MIN_CAPACITY), whole)
        batch = -(-power_of_two(rows or len(requests)) // shards) * shards
        return Bucket(
            batch=batch,
            capacity=capacity,
            block=self._block(requests, batch),
            stops=room_of(len(request.stop_token_ids) for request in requests),
            source=source_shape([request.source for request in requests]),
            logprobs=self._logprobs(requests),
            prompt_logprobs=any(
                request.sampling.prompt_logprobs is not None for request in requests
            ),
        )

    def room(self, requests: Sequence[Request]) -> Room:
        """What the sampling parameters of the requests need of a program that serves them all."""
        words = [request.bad_words for request in requests]
        features = SamplingFeatures.of(
            [request.sampling for request in requests],
            words,
            [request.timestamps for request in requests],
        )
        if any(request.grammar for request in requests):
            # A round is then two programs, and waits for the host: a step more matters little.
            features = features.broadened()
        return Room.of([request.stop_token_ids for request in requests], words, features)

    def _block(self, requests: Sequence[Request], together: int) -> int:
        """Tokens of a prompt that are read at a time if so many rows are read together."""
        longest = max(len(request.prompt_token_ids) for request in requests)
        rows, width = together // self._shards, self.target.config.embed_size
        return prompt_block(self.target.platform, longest, rows, width)

    def _logprobs(self, requests: Sequence[Request]) -> int | None:
        rows = [request.sampling for request in requests]
        asked = [each for row in rows for each in (row.logprobs, row.prompt_logprobs)]
        known = [each for each in asked if each is not None]
        # As many as may be asked for: a few more take less time than another program.
        return min(MAX_LOGPROBS, self.target.config.vocab_size) if known else None

    def start(
        self, requests: Sequence[Request], on_draft: Callable[[Draft], None] | None = None
    ) -> Batch:
        """A batch of all the requests, one row each, whose prompts are read at once.

        Args:
          requests: in the order of their slots.
          on_draft: called with each round's draft before it is verified; rounds are then run in
            two parts, which takes time.
        """
        bucket = self.bucket(requests)
        batch = self._batch(requests, bucket, bucket.batch, on_draft)
        batch.join(dict(enumerate(requests)))
        return batch

    def open(self, requests: Sequence[Request], rows: int) -> Batch:
        """An empty batch, with room for `rows` of the requests at a time.

        The same program always reads the prompts, the same number of rows per call. So a row's
        cache does not depend, to the last bit, on when it joins or on which rows join with it.
        """
        bucket = self.bucket(requests, min(rows, len(requests)))
        together = bucket.batch  # no row joins later
        if len(requests) > rows:
            bucket = dataclasses.replace(bucket, block=self._block(requests, self._shards))
            together = joining(self.target.platform, bucket, self._shards)
            bucket = dataclasses.replace(bucket, block=self._block(requests, together))
        return self._batch(requests, bucket, together)

    def _batch(
        self,
        requests: Sequence[Request],
        bucket: Bucket,
        together: int,
        on_draft: Callable[[Draft], None] | None = None,
    ) -> Batch:
        admission = Admission(self._reader, bucket, together, self._shards, self.room(requests))
        rounds = Rounds(self.compiler, (self.target, self.drafter), self.strategy)
        host = None if self._host is None else self._host.begin(self.compiler, bucket)
        return Batch(admission, rounds, host, self.cost_profiler, on_draft)

    @property
    def _reader(self) -> Reader:
        return Reader(
            self.compiler,
            self.target,
            self.drafter,
            self.strategy.draft_length,
            self.inputs,
            self._headroom,
            self._keep_states,
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
        return self._reader.program(requests, self.bucket(requests))

    def _headroom(self, block: int) -> int:
        return headroom(block, self.strategy.scoring, self.drafter.lookahead, self.drafter.drafts)

    def memory(self) -> tuple[int, int]:
        """(bytes of weights and caches, bytes that the largest decoding program takes in all)."""
        return self.compiler.memory(DECODE)
