"""A target and how it is drafted for on a layout, and jobs of a batch size and a context."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx

from spec_jax.checkpoints.shape import Shape
from spec_jax.config import PLAN_METHODS, PromptLookupConfig, check_choice
from spec_jax.decoding.score import headroom
from spec_jax.drafters.base import Drafter
from spec_jax.drafters.draft_model import DraftModel, headroom_of_drafts
from spec_jax.drafters.early_exit import EarlyExit, exit_layers
from spec_jax.drafters.none import NoDraft
from spec_jax.drafters.prompt_lookup import PromptLookup
from spec_jax.engine.batch_shape import BatchShape, prompt_block
from spec_jax.engine.offloading import offloaded
from spec_jax.engine.prefill_queue import rows_read_together
from spec_jax.errors import ConfigError
from spec_jax.models.model import Model
from spec_jax.planning.abstract import abstract_model, check_forms, plan_shape, stand_ins
from spec_jax.planning.cost import Cache, Call, Terms, Weights, exchange_seconds
from spec_jax.planning.plan_figures import CallPlan, PrefillPlan
from spec_jax.planning.sampling import sampling_exchanges
from spec_jax.planning.temporaries import of_prefill, of_round
from spec_jax.sampling.parameters import SamplingFeatures
from spec_jax.sharding import Chip, Layout


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


def check_drafting(
    target: Shape, draft: Shape | None, method: str, early_exit_layers: int | None
) -> int:
    """The layers that draft by `early_exit`, 0 for other methods.

    Raises:
      ConfigError: the method is unknown, or takes no draft model, or no layers.
    """
    check_choice("method", method, PLAN_METHODS)
    if (draft is None) == (method == "draft_model"):
        if draft is None:
            raise ConfigError(f"method {method!r} takes a draft model; name one as draft.")
        raise ConfigError(
            f"the draft is {draft.name}, but method {method!r} does without a draft model; leave "
            "one of them out."
        )
    if method == "early_exit":
        return exit_layers(early_exit_layers, target.config, target.name)
    if early_exit_layers is not None:
        raise ConfigError(
            f"early_exit_layers is {early_exit_layers}, which method 'early_exit' takes and "
            f"{method!r} does not; leave it out, or choose that method."
        )
    return 0


@dataclasses.dataclass(frozen=True)
class Pair:
    """What the jobs of a target and its drafting share: abstract models and their weights.

    Attributes:
      target: the target.
      draft: the model that drafts, if one does: the draft model, or by `early_exit` the target with
        the layers that draft on the devices, as `Model.with_resident` has it.
      method: one of `PLAN_METHODS`.
      exit_layers: the layers that draft by `early_exit`; otherwise 0.
      chip: the figures by which times are projected; None if there are none, or for quantized
        matrices on GPUs, whose products are far from reading them at the speed of the memory.
    """

    target: Model
    draft: Model | None
    layout: Layout
    method: str
    exit_layers: int
    cache_dtype: Any
    chip: Chip | None

    @property
    def platform(self) -> str:
        """`cpu`, `gpu` or `tpu`."""
        return self.layout.platform or "cpu"

    @classmethod
    def of(
        cls,
        target: Shape,
        draft: Shape | None,
        layout: Layout,
        dtype: str,
        quantization: str = "none",
        offload: str = "none",
        resident_layers: int = 0,
        *,
        method: str = "draft_model",
        exit_layers: int = 0,
        devices: Sequence[Any] | None = None,
    ) -> "Pair":
        """Lays out the models; arguments like `make_plan`.

        `devices` are what to compile for; by default stand-ins.

        Raises:
          ConfigError: the layout does not fit a model, or the target is not a .gguf file.
        """
        check_forms(quantization, target)
        devices = devices or stand_ins(layout)

        def model(role: str, shape: Shape, offload: str = "none", resident: int = 0) -> Model:
            placement = layout.place(role, shape.config.axis_sizes, devices)
            placement = offloaded(placement, shape.config, offload, resident)
            return abstract_model(shape.config, dtype, quantization, placement, shape.forms)

        here = model("target", target, offload, resident_layers)
        there = model("draft", draft) if draft else None
        if exit_layers:
            resident = max(resident_layers, exit_layers) if offload == "host" else 0
            there = model("target", target, offload, resident)
        # On CPU a model keeps its cache in float32.
        cache_dtype = jnp.dtype("float32" if layout.platform == "cpu" else dtype)
        is_known = layout.platform != "gpu" or quantization == "none"
        return cls(
            here,
            there,
            layout,
            method,
            exit_layers,
            cache_dtype,
            layout.chip if is_known else None,
        )

    def drafter(self, lookahead: int) -> Drafter:
        """What drafts K = `lookahead` tokens."""
        if self.draft is not None and self.exit_layers:
            return EarlyExit(self.draft, lookahead, self.exit_layers)
        if self.draft is not None:
            return DraftModel(self.draft, lookahead)
        if self.method == "none":
            return NoDraft(lookahead)
        return PromptLookup(lookahead, PromptLookupConfig().prompt_lookup_max)

    @functools.cached_property
    def weights(self) -> Weights:
        """The target's weights."""
        return Weights(self.target)

    @functools.cached_property
    def drafting(self) -> Weights | None:
        """The weights that draft: of the draft model, or of the target's first layers."""
        if self.draft is not None and self.exit_layers:
            return _weights_of_layers(self.draft, slice(self.exit_layers))
        return Weights(self.draft) if self.draft is not None else None

    @functools.cached_property
    def scoring(self) -> Weights:
        """The weights that score: the target's, without the layers that have drafted."""
        if not self.exit_layers:
            return self.weights
        return _weights_of_layers(self.target, slice(self.exit_layers, None))

    @property
    def held_bytes(self) -> int:
        """Weights in a chip's memory: of the target, and of what drafts beside it."""
        if self.exit_layers:  # only layers that the target streams lie there once more
            return self.weights.held + sum(self.weights.streamed[: self.exit_layers])
        return self.weights.held + (self.drafting.held if self.drafting else 0)

    def job(self, batch: int, context: int, lookahead: int, features: SamplingFeatures) -> "Job":
        """Rows that may fill the context, drafted `lookahead` tokens at a time."""
        drafter = self.drafter(lookahead)
        shapes = plan_shape(self.target, drafter, batch, context, self.platform)
        return Job(self, shapes, context, lookahead, features)


def _weights_of_layers(model: Model, some: slice) -> Weights:
    """The weights of some layers, with embedding and head."""
    blocks = [model.params["blocks"][i] for i in range(model.config.num_layers)[some]]
    params = nnx.State({**model.params, "blocks": nnx.State(dict(enumerate(blocks)))})
    config = dataclasses.replace(model.config, layers=model.config.layers[some])
    return Weights(dataclasses.replace(model, config=config, params=params))


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
    def models(self) -> list[tuple[Weights, Cache]]:
        """The models with a cache: the target, then the draft model."""
        models = [self.pair.weights]
        if self.pair.drafting is not None and not self.pair.exit_layers:
            models.append(self.pair.drafting)
        return [(each, self._cache(each)) for each in models]

    def _call(self, weights: Weights, tokens: int) -> CallPlan:
        """A call over `tokens` tokens of each row."""
        return self._plan(Call.of(weights, self._cache(weights), tokens))

    def _cache(self, weights: Weights) -> Cache:
        """The cache of a model, or the part of the target's that some of its layers have."""
        shapes, slots = self.shapes, headroom(self.shapes.block, "block", self.lookahead, 1)
        if weights is self.pair.drafting and not self.pair.exit_layers:
            slots = headroom_of_drafts(shapes.block, self.lookahead)
        return weights.cache(shapes.batch, shapes.capacity, slots, self.pair.cache_dtype)

    def _plan(self, call: Call) -> CallPlan:
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
    def target_call(self) -> CallPlan:
        """The target over one token of each row."""
        return self._call(self.pair.weights, 1)

    @property
    def scoring(self) -> CallPlan:
        """The target over K + 1 tokens of each row, from the layer on where drafting stopped."""
        call = Call.of(self.pair.scoring, self._cache(self.pair.scoring), self.lookahead + 1)
        if self.pair.scoring is not self.pair.weights:  # the hidden states are there already
            exchanges = tuple(each for each in call.exchanges if each.what != "embedding")
            call = dataclasses.replace(call, exchanges=exchanges)
        return self._plan(call)

    @property
    def draft_step(self) -> CallPlan | None:
        """What drafts one token of each row; None if no model does."""
        drafting = self.pair.drafting
        return None if drafting is None else self._call(drafting, 1)

    @property
    def sampling(self) -> CallPlan:
        """The collectives of drawing and verification in a round, and nothing else."""
        chip, rows = self.pair.chip, self.models[0][1].rows
        weights = self.pair.weights, self.pair.drafting
        exchanges = sampling_exchanges(*weights, rows, self.lookahead, self.features)
        if not chip:
            return CallPlan(exchanges=exchanges)
        latency, transfer = exchange_seconds(exchanges, self.pair.layout.platform, chip)
        terms = Terms(latency=latency, transfer=transfer)
        return CallPlan(exchanges=exchanges, terms=terms, seconds=terms.total)

    @property
    def _draft_steps(self) -> list[CallPlan]:
        """A draft model's first step reads two tokens; early layers read the last draft token."""
        drafting, step = self.pair.drafting, self.draft_step
        if drafting is None or step is None:
            return []
        if self.pair.exit_layers:  # the last one draws no token, and needs no head
            cache = self._cache(drafting)
            last = Call.of(drafting, cache, 1, seen=max(cache.slots))
            return [*[step] * self.lookahead, self._plan(last)]
        return [self._call(drafting, 2), *[step] * (self.lookahead - 1)]

    @property
    def round(self) -> CallPlan:
        """The draft steps, scoring, and sampling."""
        calls = [self.scoring, *self._draft_steps, self.sampling]
        terms = [each.terms for each in calls if each.terms]
        return CallPlan(
            self.pair.held_bytes,
            self.scoring.host_bytes,
            sum(cache.bytes for _, cache in self.models),
            of_round(self.models, self.pair.drafting, self.lookahead, self.pair.platform),
            exchanges=tuple(exchange for each in calls for exchange in each.exchanges),
            terms=sum(terms, Terms()) if terms else None,
            seconds=sum(each.total for each in terms) if terms else None,
        )

    @property
    def prefill(self) -> PrefillPlan:
        """Prefill of prompts as long as the context into all caches, all rows at once."""
        chip, block, platform = self.pair.chip, self.shapes.block, self.pair.platform
        chunks = -(-(self.context - 1) // block)
        seconds = None
        if chip:
            # On average a chunk sees half of the prompt, and the half of itself.
            seen = (chunks + 1) * block // 2
            calls = [Call.of(*each, block, seen=seen) for each in self.models]
            seconds = chunks * sum(
                call.terms(self.pair.layout.platform, chip).total for call in calls
            )
        alone = prompt_block(platform, self.context, 1, self.pair.target.config.embed_size)
        shape = dataclasses.replace(self.shapes, block=alone)
        together = rows_read_together(platform, shape, self.pair.weights.shards("batch"))
        caches = [cache for _, cache in self.models]
        return PrefillPlan(
            block=block,
            chunks=chunks,
            held_bytes=self.pair.held_bytes + sum(each.bytes for each in caches),
            temporary_bytes=of_prefill(self.models, block, platform),
            joining_bytes=sum(each.bytes * together // self.shapes.batch for each in caches),
            seconds=seconds,
        )
