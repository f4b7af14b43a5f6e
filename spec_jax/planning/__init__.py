"""Plans: what a target and its draft will take on a layout, before a chip is rented."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from spec_jax.checkpoints.shape import Shape
from spec_jax.config import DTYPES
from spec_jax.drafters.draft_model import DraftModel
from spec_jax.engine import Bucket
from spec_jax.errors import ConfigError
from spec_jax.models.config import TransformerConfig
from spec_jax.models.sizes import parameter_count
from spec_jax.models.transformer import Model
from spec_jax.planning import cost
from spec_jax.planning.abstract import abstract_cache, bucket, stand_ins
from spec_jax.planning.compiled import Program, compile_call, compile_round, devices_for
from spec_jax.planning.cost import Call, Terms
from spec_jax.sharding import Layout, Placement

__all__ = ["Plan", "Replicated", "Section", "make_plan"]


@dataclasses.dataclass(frozen=True)
class Replicated:
    """An axis that the layout would cut more often than the model's size allows.

    Attributes:
      role: `target` or `draft`.
      axis: the logical axis.
      size: the model's.
      asked: into how many pieces the layout would cut it.
      ways: into how many it is cut.
    """

    role: str
    axis: str
    size: int
    asked: int
    ways: int


@dataclasses.dataclass(frozen=True)
class Section:
    """One program of a plan, on each chip.

    Attributes:
      weight_bytes: the weights that a chip holds.
      cache_bytes: its part of the caches.
      collectives: kind -> count, computed.
      collective_bytes: bytes that these exchange.
      terms: what the projected time is made of; None if nothing is known of the chip.
      seconds: the projected time.
      program: what the compiler says, if it was asked.
    """

    weight_bytes: int
    cache_bytes: int
    collectives: dict[str, int]
    collective_bytes: int
    terms: Terms | None
    seconds: float | None
    program: Program | None = None

    @property
    def memory_bytes(self) -> int | None:
        """Compiled, or else computed; None if the compiler found it too large to compile."""
        if self.program is None:
            return self.weight_bytes + self.cache_bytes
        return self.program.memory_bytes

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it; the compiler's figures take the place of computed ones."""
        compiled = self.program.as_dict() if self.program else None
        return {
            "memory_bytes_per_chip": self.memory_bytes,
            "collectives": compiled["collectives"] if compiled else self.collectives,
            "projected_seconds": self.seconds,
            "computed": {
                "weight_bytes": self.weight_bytes,
                "cache_bytes": self.cache_bytes,
                "collectives": self.collectives,
                "collective_bytes": self.collective_bytes,
                "seconds": dataclasses.asdict(self.terms) if self.terms else None,
            },
            "compiled": compiled,
        }


@dataclasses.dataclass(frozen=True)
class Plan:
    """A target and its draft on a layout; every time is a projection.

    Attributes:
      target: the target's shape.
      draft: the draft's.
      layout: the layout.
      dtype: of weights and, but on CPU, caches.
      batch: rows, as they are padded.
      capacity: cache entries of a row: the context and the room that a round needs.
      num_speculative_tokens: draft tokens of a round (K).
      acceptance: the probability that a draft token is accepted; an assumption.
      target_call: one token of each row.
      scoring: K + 1 tokens of each row.
      draft_step: one token of each row, by the draft.
      round: K draft steps, the first of which reads two tokens, and scoring; the projection leaves
        sampling and verification out.
      replicated: axes that are not cut as the layout says.
      tokens_per_round: what a round emits on average.
      speedup: over plain decoding; None if nothing is known of the chip.
      best: the K of the largest speed-up, and that speed-up.
    """

    target: Shape
    draft: Shape
    layout: Layout
    dtype: str
    batch: int
    capacity: int
    num_speculative_tokens: int
    acceptance: float
    target_call: Section
    scoring: Section
    draft_step: Section
    round: Section
    replicated: tuple[Replicated, ...]
    tokens_per_round: float
    speedup: float | None
    best: tuple[int, float] | None

    @property
    def compile_seconds(self) -> float | None:
        """Tracing and compiling in all, if that was asked for."""
        sections = (self.target_call, self.scoring, self.draft_step, self.round)
        programs = [each.program for each in sections if each.program]
        return sum(each.compile_seconds for each in programs) if programs else None

    @property
    def fits(self) -> bool | None:
        """Whether a round fits a chip's memory; None if nothing is known of the chip."""
        if self.round.memory_bytes is None:
            return False
        return self.layout.chip and self.round.memory_bytes <= self.layout.chip.memory

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        chip = self.layout.chip
        return {
            "projection": True,
            "target": _model_as_dict(self.target),
            "draft": _model_as_dict(self.draft),
            "layout": self.layout.name,
            "devices": self.layout.size,
            "chip": dataclasses.asdict(chip) if chip else None,
            "dtype": self.dtype,
            "batch": self.batch,
            "capacity": self.capacity,
            "num_speculative_tokens": self.num_speculative_tokens,
            "acceptance": self.acceptance,
            "target_call": self.target_call.as_dict(),
            "scoring": self.scoring.as_dict(),
            "draft_step": self.draft_step.as_dict(),
            "round": self.round.as_dict(),
            "tokens_per_round": self.tokens_per_round,
            "speedup": self.speedup,
            "best_num_speculative_tokens": self.best[0] if self.best else None,
            "best_speedup": self.best[1] if self.best else None,
            "replicated": [dataclasses.asdict(each) for each in self.replicated],
            "compile_seconds": self.compile_seconds,
            "fits": self.fits,
        }


def make_plan(
    target: Shape,
    draft: Shape,
    layout: Layout,
    *,
    num_speculative_tokens: int = 4,
    acceptance: float = 0.8,
    batch: int = 1,
    context: int | None = None,
    dtype: str = "bfloat16",
    compile: bool = False,
    on_progress: Callable[[str], object] | None = None,
) -> Plan:
    """Plans a target and its draft on a layout.

    Args:
      target: the target's shape.
      draft: the draft's.
      layout: the layout; without figures of its chip no time is projected.
      num_speculative_tokens: draft tokens of a round (K).
      acceptance: the probability that a draft token is accepted.
      batch: rows decoded together.
      context: longest prompt and completion together; the target's own by default.
      dtype: `float32` or `bfloat16`.
      compile: ask the compiler for memory and collectives; minutes for a large model.
      on_progress: called with a line of text before each step that takes time.

    Raises:
      ConfigError: a value is out of range, the layout does not fit the models, or what compiling
        takes is not here.
    """
    most = target.config.max_position
    context = most if context is None else context
    _check(num_speculative_tokens, acceptance, batch, context, dtype)
    if context > most:
        raise ConfigError(
            f"context is {context}, but {target.name} was made for {most} tokens; give at most "
            f"{most}."
        )
    progress = on_progress or (lambda line: None)
    shapes = {"target": target, "draft": draft}

    def models(devices: Sequence) -> tuple[Model, Model]:
        placed = []
        for role, shape in shapes.items():
            placement = layout.place(role, shape.config.axis_sizes, devices)
            placed.append(Model.abstract(shape.config, dtype=jnp.dtype(dtype), placement=placement))
        return placed[0], placed[1]

    progress("laying out the models")
    abstract = models(stand_ins(layout))
    drafter = DraftModel(abstract[1], num_speculative_tokens)
    static = bucket(abstract[0], drafter, batch, context)
    # On CPU a model keeps its cache in float32.
    cache_dtype = jnp.dtype("float32" if layout.platform == "cpu" else dtype)
    caches = [abstract_cache(each, static.batch, static.capacity, cache_dtype) for each in abstract]

    def call(role: int, tokens: int) -> Section:
        return _section(Call.of(abstract[role], caches[role], tokens), layout)

    def round_of(lookahead: int) -> Section:
        drafted = [call(1, 2), *[call(1, 1)] * (lookahead - 1)]
        return _together(call(0, lookahead + 1), drafted)

    lookahead = num_speculative_tokens
    sections = {
        "target_call": call(0, 1),
        "scoring": call(0, lookahead + 1),
        "draft_step": call(1, 1),
        "round": round_of(lookahead),
    }
    speedup = best = None
    if (plain := sections["target_call"].seconds) is not None:

        def round_seconds(lookahead: int) -> float:
            seconds = round_of(lookahead).seconds
            assert seconds is not None  # as of the target call
            return seconds

        speedup = cost.speedup(acceptance, lookahead, plain, round_seconds)
        k = cost.best_lookahead(acceptance, plain, round_seconds)
        best = k, cost.speedup(acceptance, k, plain, round_seconds)
    if compile:
        programs = _compile(*models(devices_for(layout)), lookahead, static, cache_dtype, progress)
        for name, program in programs.items():
            sections[name] = dataclasses.replace(sections[name], program=program)
    placements = [model.placement for model in abstract]
    return Plan(
        target=target,
        draft=draft,
        layout=layout,
        dtype=dtype,
        batch=static.batch,
        capacity=static.capacity,
        num_speculative_tokens=lookahead,
        acceptance=acceptance,
        **sections,
        replicated=tuple(
            each
            for (role, shape), placement in zip(shapes.items(), placements, strict=True)
            if placement is not None
            for each in _replicated(layout, role, shape.config, placement)
        ),
        tokens_per_round=cost.tokens_per_round(acceptance, lookahead),
        speedup=speedup,
        best=best,
    )


def _compile(
    target: Model,
    draft: Model,
    lookahead: int,
    shapes: Bucket,
    cache_dtype: Any,
    progress: Callable[[str], object],
) -> dict[str, Program]:
    calls = {
        "target_call": (target, 1),
        "scoring": (target, lookahead + 1),
        "draft_step": (draft, 1),
    }
    programs = {}
    for name, (model, tokens) in calls.items():
        progress(f"compiling the {name.replace('_', ' ')}")
        programs[name] = compile_call(model, shapes, tokens, cache_dtype)
    progress("compiling the round")
    programs["round"] = compile_round(target, DraftModel(draft, lookahead), shapes)
    return programs


def _check(lookahead: int, acceptance: float, batch: int, context: int, dtype: str) -> None:
    counts = {"num_speculative_tokens": lookahead, "batch": batch, "context": context}
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; give at least 1.")
    if not 0 <= acceptance <= 1:
        raise ConfigError(f"acceptance is {acceptance}; give a probability, such as 0.8.")
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}.")


def _section(call: Call, layout: Layout) -> Section:
    terms = call.terms(layout.platform, layout.chip) if layout.chip else None
    return Section(
        weight_bytes=call.weight_bytes,
        cache_bytes=call.cache_bytes,
        collectives=call.collectives,
        collective_bytes=call.collective_bytes,
        terms=terms,
        seconds=terms.total if terms else None,
    )


def _together(scoring: Section, drafted: Sequence[Section]) -> Section:
    """A round: what it holds is one target and one draft, what it does is all of its calls."""
    calls = [scoring, *drafted]
    counts = [each.collectives.get("all-reduce", 0) for each in calls]
    terms = [each.terms for each in calls if each.terms]
    return Section(
        weight_bytes=scoring.weight_bytes + drafted[0].weight_bytes,
        cache_bytes=scoring.cache_bytes + drafted[0].cache_bytes,
        collectives={"all-reduce": sum(counts)} if any(counts) else {},
        collective_bytes=sum(each.collective_bytes for each in calls),
        terms=sum(terms[1:], terms[0]) if terms else None,
        seconds=sum(each.total for each in terms) if terms else None,
    )


def _replicated(
    layout: Layout, role: str, config: TransformerConfig, placement: Placement
) -> list[Replicated]:
    mesh, found = dict(layout.mesh), []
    for axis, rule in getattr(layout, role):
        size, asked = config.axis_sizes.get(axis), math.prod(mesh[name] for name in rule.axes)
        if size is not None and placement.ways(axis) < asked:
            found.append(Replicated(role, axis, size, asked, placement.ways(axis)))
    return found


def _model_as_dict(shape: Shape) -> dict[str, Any]:
    published = shape.published
    return {
        "name": shape.name,
        "parameters": parameter_count(shape.config),
        "published": dataclasses.asdict(published) if published else None,
    }
