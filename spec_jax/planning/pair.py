"""A target and its draft on a layout, and jobs of a batch size and a context."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from spec_jax.checkpoints.shape import Shape
from spec_jax.decoding.score import headroom
from spec_jax.drafters.draft_model import DraftModel, headroom_of_drafts
from spec_jax.engine.batch_shape import BatchShape, prompt_block
from spec_jax.engine.offloading import offloaded
from spec_jax.engine.prefill_queue import rows_read_together
from spec_jax.errors import ConfigError
from spec_jax.models.model import Model
from spec_jax.planning.abstract import abstract_model, plan_shape, stand_ins
from spec_jax.planning.cost import Cache, Call, Terms, Weights, exchange_seconds
from spec_jax.planning.plan_figures import CallPlan, PrefillPlan
from spec_jax.planning.sampling import sampling_exchanges
from spec_jax.planning.temporaries import of_prefill, of_round
from spec_jax.sampling.parameters import SamplingFeatures
from spec_jax.sharding import ROLES, Chip, Layout


def check_context(context: int, target: Shape) -> None:
    """Refuses a context that the target was not made for.

    Raises:
      ConfigError: it is too long.
    """
    if context > (limit := target.config.max_position):
        raise ConfigError(
            f"context is {context}, but {target.name} was made for {limit} tokens; give at most "
            f"{limit}."
        )


@dataclasses.dataclass(frozen=True)
class Pair:
    """What the jobs of a target and its draft share: abstract models, and weights on each chip.

    `chip` are the figures by which times are projected; None if there are none, or for quantized
    matrices on GPUs, whose products are far from reading them at the speed of the memory.
    """

    models: tuple[Model, Model]
    weights: tuple[Weights, Weights]
    layout: Layout
    cache_dtype: Any
    chip: Chip | None

    @property
    def platform(self) -> str:
        """`cpu`, `gpu` or `tpu`."""
        return self.layout.platform or "cpu"

    @classmethod
    def of(
        cls,
        shapes: tuple[Shape, Shape],
        layout: Layout,
        dtype: str,
        quantization: str = "none",
        offload: str = "none",
        resident_layers: int = 0,
        devices: Sequence[Any] | None = None,
    ) -> "Pair":
        """Lays out a target and a draft; arguments like `make_plan`.

        `devices` are what to compile for; by default stand-ins.

        Raises:
          ConfigError: the layout does not fit a model.
        """
        configs, devices = [shape.config for shape in shapes], devices or stand_ins(layout)
        here, there = (
            layout.place(role, config.axis_sizes, devices)
            for role, config in zip(ROLES, configs, strict=True)
        )
        here = offloaded(here, configs[0], offload, resident_layers)
        target = abstract_model(configs[0], dtype, quantization, here)
        draft = abstract_model(configs[1], dtype, quantization, there)
        # On CPU a model keeps its cache in float32.
        cache_dtype = jnp.dtype("float32" if layout.platform == "cpu" else dtype)
        is_known = layout.platform != "gpu" or quantization == "none"
        chip = layout.chip if is_known else None
        return cls((target, draft), (Weights(target), Weights(draft)), layout, cache_dtype, chip)

    def job(self, batch: int, context: int, lookahead: int, features: SamplingFeatures) -> "Job":
        """Rows that may fill the context, drafted `lookahead` tokens at a time."""
        target, draft = self.models
        shapes = plan_shape(target, DraftModel(draft, lookahead), batch, context, self.platform)
        return Job(self, shapes, context, lookahead, features)


@dataclasses.dataclass(frozen=True)
class Job:
    """A batch of a pair; every time is a projection.

    The context is the tokens of the longest prompt, and of prompt and completion together.
    """

    pair: Pair
    shapes: BatchShape
    context: int
    lookahead: int
    features: SamplingFeatures

    @functools.cached_property
    def caches(self) -> tuple[Cache, Cache]:
        """The caches of target and draft."""
        (target, draft), dtype = self.pair.weights, self.pair.cache_dtype
        size, block = (self.shapes.batch, self.shapes.capacity), self.shapes.block
        return (
            target.cache(*size, headroom(block, "block", self.lookahead, 1), dtype),
            draft.cache(*size, headroom_of_drafts(block, self.lookahead), dtype),
        )

    def call(self, role: int, tokens: int) -> CallPlan:
        """A call of the target (0) or the draft (1) over `tokens` tokens of each row."""
        call = Call.of(self.pair.weights[role], self.caches[role], tokens)
        chip = self.pair.chip
        terms = call.terms(self.pair.layout.platform, chip) if chip else None
        return CallPlan(
            call.weight_bytes,
            call.host_bytes,
            call.cache_bytes,
            exchanges=call.exchanges,
            terms=terms,
            seconds=terms.total if terms else None,
        )

    @property
    def sampling(self) -> CallPlan:
        """The collectives of drawing and verification in a round, and nothing else."""
        chip, (target, draft) = self.pair.chip, self.pair.weights
        rows = self.caches[0].rows
        exchanges = sampling_exchanges(target, draft, rows, self.lookahead, self.features)
        if not chip:
            return CallPlan(exchanges=exchanges)
        latency, transfer = exchange_seconds(exchanges, self.pair.layout.platform, chip)
        terms = Terms(latency=latency, transfer=transfer)
        return CallPlan(exchanges=exchanges, terms=terms, seconds=terms.total)

    @property
    def round(self) -> CallPlan:
        """K draft steps, the first of which reads two tokens, scoring, and sampling."""
        scoring, first = self.call(0, self.lookahead + 1), self.call(1, 2)
        steps = [self.call(1, 1)] * (self.lookahead - 1) if self.lookahead > 1 else []
        calls = [scoring, first, *steps, self.sampling]
        terms = [each.terms for each in calls if each.terms]
        return CallPlan(
            scoring.weight_bytes + first.weight_bytes,
            scoring.host_bytes + first.host_bytes,
            scoring.cache_bytes + first.cache_bytes,
            of_round(self.pair.weights, self.caches, self.lookahead, self.pair.platform),
            exchanges=tuple(exchange for each in calls for exchange in each.exchanges),
            terms=sum(terms, Terms()) if terms else None,
            seconds=sum(each.total for each in terms) if terms else None,
        )

    @property
    def prefill(self) -> PrefillPlan:
        """Prefill of prompts as long as the context into both models' caches, all rows at once."""
        chip, block, platform = self.pair.chip, self.shapes.block, self.pair.platform
        chunks = -(-(self.context - 1) // block)
        caches, weights = self.caches, self.pair.weights
        seconds = None
        if chip:
            # On average a chunk sees half of the prompt, and the half of itself.
            seen = (chunks + 1) * block // 2
            calls = [
                Call.of(each, cache, block, seen=seen)
                for each, cache in zip(weights, caches, strict=True)
            ]
            seconds = chunks * sum(
                call.terms(self.pair.layout.platform, chip).total for call in calls
            )
        alone = prompt_block(platform, self.context, 1, weights[0].config.embed_size)
        shape = dataclasses.replace(self.shapes, block=alone)
        together = rows_read_together(platform, shape, weights[0].shards("batch"))
        return PrefillPlan(
            block=block,
            chunks=chunks,
            held_bytes=sum(each.held for each in weights) + sum(each.bytes for each in caches),
            temporary_bytes=of_prefill(weights, caches, block, platform),
            joining_bytes=sum(each.bytes * together // self.shapes.batch for each in caches),
            seconds=seconds,
        )
