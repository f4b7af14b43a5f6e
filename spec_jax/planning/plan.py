"""Makes plans: shards the models, counts, and runs the compiler on request."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from spec_jax.checkpoints.shape import Shape
from spec_jax.config import DTYPES, OFFLOADS, PLAN_QUANTIZATIONS
from spec_jax.drafters.draft_model import DraftModel, headroom_of_drafts
from spec_jax.engine.offloading import offloaded
from spec_jax.engine.requests import Bucket
from spec_jax.errors import ConfigError
from spec_jax.models.config import TransformerConfig
from spec_jax.models.model import Model
from spec_jax.models.sizes import WideShallow
from spec_jax.planning import cost
from spec_jax.planning.abstract import abstract_cache, abstract_model, bucket, stand_ins
from spec_jax.planning.compiled import (
    Program,
    compile_call,
    compile_prefill,
    compile_round,
    devices_for,
)
from spec_jax.planning.cost import Call
from spec_jax.planning.report import Plan, Replicated, Section
from spec_jax.sharding import Layout, Placement


def derived_draft(target: Shape, layout: Layout) -> Shape:
    """A wide and shallow draft for a target, whose heads are sharded if the target's can be."""
    rule = dict(layout.draft).get("heads")
    mesh, heads = dict(layout.mesh), target.config.num_heads
    num_shards = math.prod(mesh[axis] for axis in rule.axes) if rule else 1
    shape = WideShallow(num_shards=num_shards if heads % num_shards == 0 else 1)(target.config)
    return Shape(f"a wide and shallow draft of {target.name}", shape)


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
    quantization: str = "none",
    offload: str = "none",
    resident_layers: int = 0,
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
      context: most tokens of prompt and completion together; the target's own by default.
      dtype: `float32` or `bfloat16`.
      quantization: of the matrices of both models: `none`, `int8` or `int4`.
      offload: `host` plans the target's blocks in host memory, from where every call streams them.
      resident_layers: how many of them, the first ones, stay on the chips all the same.
      compile: ask the compiler for memory and collectives; minutes for a large model.
      on_progress: called with a line of text before each step that takes time.

    Raises:
      ConfigError: a value is out of range, the layout does not fit the models, or something that
        compiling needs is missing.
    """
    most = target.config.max_position
    context = most if context is None else context
    _check(num_speculative_tokens, acceptance, batch, context)
    for name, value, known in (
        ("dtype", dtype, DTYPES),
        ("quantization", quantization, PLAN_QUANTIZATIONS),
        ("offload", offload, OFFLOADS),
    ):
        if value not in known:
            raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(known)}.")
    if offload == "host" and layout.chip and layout.chip.host is None:
        raise ConfigError(
            f"offload is 'host', but layout {layout.name} does not say how fast a device reads "
            "host memory; add host_gb_per_s under [chip], such as 32 for PCIe 4.0 x16."
        )
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
            if role == "target":
                placement = offloaded(placement, shape.config, offload, resident_layers)
            placed.append(abstract_model(shape.config, dtype, quantization, placement))
        return placed[0], placed[1]

    progress("laying out the models")
    abstract = models(stand_ins(layout))
    drafter = DraftModel(abstract[1], num_speculative_tokens)
    static = bucket(abstract[0], drafter, batch, context)
    # On CPU a model keeps its cache in float32.
    cache_dtype = jnp.dtype("float32" if layout.platform == "cpu" else dtype)
    headroom = headroom_of_drafts(static.block, num_speculative_tokens)
    caches = [
        abstract_cache(each, static.batch, static.capacity, cache_dtype, headroom)
        for each in abstract
    ]

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
    prefill = None
    if compile:
        programs = _compile(*models(devices_for(layout)), lookahead, static, cache_dtype, progress)
        prefill = programs.pop("prefill")
        for name, program in programs.items():
            sections[name] = dataclasses.replace(sections[name], program=program)
    placements = [model.placement for model in abstract]
    return Plan(
        target=target,
        draft=draft,
        layout=layout,
        dtype=dtype,
        quantization=quantization,
        offload=offload,
        resident_layers=resident_layers,
        batch=static.batch,
        capacity=static.capacity,
        num_speculative_tokens=lookahead,
        acceptance=acceptance,
        **sections,
        prefill=prefill,
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
    drafter = DraftModel(draft, lookahead)
    progress("compiling the round")
    programs["round"] = compile_round(target, drafter, shapes)
    progress("compiling the prefill")
    programs["prefill"] = compile_prefill(target, drafter, shapes)
    return programs


def _check(lookahead: int, acceptance: float, batch: int, context: int) -> None:
    counts = {"num_speculative_tokens": lookahead, "batch": batch, "context": context}
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; give at least 1.")
    if not 0 <= acceptance <= 1:
        raise ConfigError(f"acceptance is {acceptance}; give a probability, such as 0.8.")


def _section(call: Call, layout: Layout) -> Section:
    terms = call.terms(layout.platform, layout.chip) if layout.chip else None
    return Section(
        weight_bytes=call.weight_bytes,
        host_bytes=call.host_bytes,
        cache_bytes=call.cache_bytes,
        collectives=call.collectives,
        collective_bytes=call.collective_bytes,
        terms=terms,
        seconds=terms.total if terms else None,
    )


def _together(scoring: Section, drafted: Sequence[Section]) -> Section:
    """A round: the memory of one target and one draft, and the work of all of its calls."""
    calls = [scoring, *drafted]
    counts = [each.collectives.get("all-reduce", 0) for each in calls]
    terms = [each.terms for each in calls if each.terms]
    return Section(
        weight_bytes=scoring.weight_bytes + drafted[0].weight_bytes,
        host_bytes=scoring.host_bytes + drafted[0].host_bytes,
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
        if size is not None and placement.num_shards(axis) < asked:
            found.append(Replicated(role, axis, size, asked, placement.num_shards(axis)))
    return found
