"""The programs of one target and drafter, and the batches that they decode."""

from collections.abc import Callable, Sequence

from spec_jax.config import MAX_LOGPROBS
from spec_jax.decoding import loop
from spec_jax.decoding.adaptive import Adaptive
from spec_jax.decoding.draft_length import DraftLengthPolicy
from spec_jax.decoding.score import kv_slots_per_round
from spec_jax.drafters.base import Drafter
from spec_jax.drafters.draft_model import DraftModel
from spec_jax.engine.batch import Batch
from spec_jax.engine.batch_shape import (
    MAX_BLOCK,
    MIN_CAPACITY,
    BatchShape,
    power_of_two,
    prompt_block,
    source_shape,
)
from spec_jax.engine.cost_profiling import CostProfiler, costs_file
from spec_jax.engine.programs import DECODE, Compiler, Program
from spec_jax.engine.requests import Request
from spec_jax.engine.rows import HostInputs, RowPrograms
from spec_jax.engine.universal_text import UniversalText
from spec_jax.models.model import Model
from spec_jax.models.sizes import layer_parameters
from spec_jax.sampling.parameters import SamplingFeatures, list_sizes


class Engine:
    """Compiled prefill and decode programs of one target, drafter and set of static choices.

    Attributes:
      inputs: makes the drafter's inputs from the host.
      host: makes what drafts on the host for a batch; None if the drafter on the device does.

    Args:
      keeps_costs: whether later processes use the costs that an adaptive policy has measured.
    """

    def __init__(
        self,
        target: Model,
        drafter: Drafter,
        policy: DraftLengthPolicy,
        verification: str = "coupled",
        *,
        scoring: str = "block",
        scoring_consistent: bool = False,
        max_model_len: int,
        inputs: HostInputs | None = None,
        host: Callable[[Compiler, BatchShape], UniversalText] | None = None,
        on_progress: Callable[[str], None] | None = None,
        keeps_costs: bool = False,
    ):
        self.target, self.drafter = target, drafter
        self.strategy = loop.Strategy(policy, verification, scoring, scoring_consistent)
        self.max_model_len = max_model_len
        self.cost_profiler: CostProfiler | None = None
        if isinstance(policy, Adaptive):
            file = costs_file((target, drafter), self.strategy) if keeps_costs else None
            share = None
            if isinstance(drafter, DraftModel):
                share = layer_parameters(drafter.model) / layer_parameters(target)
            self.cost_profiler = CostProfiler(policy, file, share)
        self._min_capacity, self._min_rows = 0, 1
        self.inputs: HostInputs = inputs or (lambda requests, shape: None)
        self.host = host
        self.compiler = Compiler(target, on_progress)
        for model in (target, drafter):
            self.compiler.held.add(model)
        self.free_idle_batch: Callable[[], Callable[[], None] | None] = lambda: None
        """A weak reference to what frees the memory of a batch in which nothing runs."""

    @property
    def shards(self) -> int:
        """The number of shards of a batch's rows."""
        return self.target.placement.num_shards("batch")

    @property
    def embed_size(self) -> int:
        """Width of the target's residual stream."""
        return self.target.config.embed_size

    def num_rows(self, least: int) -> int:
        """The smallest number of rows of a batch that is at least `least`."""
        return -(-power_of_two(least) // self.shards) * self.shards

    def reserve(self, num_tokens: int, num_seqs: int = 1) -> None:
        """Makes all batches from now on as large as some texts of some tokens need."""
        slots = power_of_two(num_tokens + self._slots_past_end, MIN_CAPACITY)
        self._min_capacity = max(self._min_capacity, slots)
        self._min_rows = max(self._min_rows, num_seqs)

    @property
    def reserves_rows(self) -> bool:
        """Whether batches have room for several rows, however few their first requests are."""
        return self._min_rows > 1

    @property
    def _slots_past_end(self) -> int:
        """KV slots past the end of a text that a round writes to."""
        drafter, scoring = self.drafter, self.strategy.scoring
        # One throw-away KV slot beside a single bfloat16 row (see Model.score).
        return kv_slots_per_round(scoring, drafter.lookahead, drafter.num_drafts) + 1

    def plan(self, requests: Sequence[Request], rows: int | None = None) -> BatchShape:
        """The smallest shape that holds the requests, `rows` of them at a time; all by default."""
        shards, target = self.shards, self.target
        longest = max(request.max_length + len(request.prediction) for request in requests)
        slots = max(power_of_two(longest + self._slots_past_end, MIN_CAPACITY), self._min_capacity)
        context = -(-(self.max_model_len + self._slots_past_end) // MAX_BLOCK) * MAX_BLOCK
        batch = self.num_rows(max(rows or len(requests), self._min_rows))
        prompt = max(len(request.prompt_token_ids) for request in requests)
        embed_size = self.embed_size
        block = prompt_block(target.platform, prompt, batch // shards, embed_size)
        stops, bad_words = list_sizes(
            [request.stop_token_ids for request in requests],
            [request.bad_words for request in requests],
        )
        return BatchShape(
            batch=batch,
            capacity=min(slots, context),
            block=prompt_block(target.platform, prompt, 1, embed_size),
            stops=stops,
            bad_words=bad_words,
            features=self.features(requests),
            logprobs=self._logprobs(requests),
            prompt_logprobs=any(
                request.sampling.prompt_logprobs is not None for request in requests
            ),
            source=source_shape([request.source for request in requests]),
            ring_block=block if self._depends_on_block else 0,
        )

    @property
    def _depends_on_block(self) -> bool:
        """Whether arrays of a batch are as large as the block that prompts are read in demands."""
        drafter = self.drafter
        models = [each for each in vars(drafter).values() if isinstance(each, Model)]
        if any(each.config.sliding_window is not None for each in (self.target, *models)):
            return True
        return not type(drafter).__module__.startswith("spec_jax.")

    def features(self, requests: Sequence[Request]) -> SamplingFeatures:
        """The steps of sampling that any of the requests needs."""
        features = SamplingFeatures.of(
            [request.sampling for request in requests],
            [request.bad_words for request in requests],
            [request.timestamps for request in requests],
        )
        if any(request.grammar for request in requests):
            # A round is then two programs, and waits for the host: a step more matters little.
            features = features.broadened()
        return self.of_few_programs(features)

    def of_few_programs(self, features: SamplingFeatures) -> SamplingFeatures:
        """Features of which there are few, if batches are for requests of any kind."""
        if self.reserves_rows and features.history:
            return features.broadened()
        return features

    def _logprobs(self, requests: Sequence[Request]) -> int | None:
        rows = [request.sampling for request in requests]
        counts = [each for row in rows for each in (row.logprobs, row.prompt_logprobs)]
        if all(each is None for each in counts):
            return None
        # As many as may be asked for: a few more take less time than another program.
        return min(MAX_LOGPROBS, self.target.config.vocab_size)

    def start(self, requests: Sequence[Request]) -> Batch:
        """A batch of all the requests, in the order of their slots, with their prompts computed."""
        if (free := self.free_idle_batch()) is not None:
            free()
        shape = self.plan(requests)
        batch = self._batch(shape, shape.batch)
        batch.insert(dict(enumerate(requests)))
        return batch

    def open(self, requests: Sequence[Request], rows: int) -> Batch:
        """An empty batch, with room for `rows` of the requests at a time."""
        shape = self.plan(requests, min(rows, len(requests)))
        fits = len(requests) <= rows and not self.reserves_rows
        return self._batch(shape, shape.batch if fits else None)

    def _batch(self, shape: BatchShape, together: int | None) -> Batch:
        return Batch(
            self.row_programs,
            shape,
            together=together,
            host=self.host,
            profiler=self.cost_profiler,
        )

    @property
    def row_programs(self) -> RowPrograms:
        """What makes rows and moves them."""
        models = self.target, self.drafter, self.strategy
        return RowPrograms(self.compiler, *models, self.inputs)

    @property
    def traces(self) -> int:
        """How many programs were traced so far: constant after warm-up inside a shape."""
        return self.compiler.traces

    @property
    def compile_seconds(self) -> float:
        """Seconds spent compiling so far."""
        return self.compiler.seconds

    def prefill(self, requests: Sequence[Request]) -> tuple[Program, tuple]:
        """The compiled reading of prompts at once, and the arguments that these requests give."""
        shape = self.plan(requests)
        batch = self._batch(shape, shape.batch)
        return self.row_programs.prefill(requests, batch.prefill_shape)

    def memory(self) -> tuple[int, int]:
        """(bytes of weights and caches, bytes that the largest decoding program takes in all)."""
        return self.compiler.memory(DECODE)
