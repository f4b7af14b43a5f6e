"""Makes plans: shards the models, counts, and runs the compiler on request."""

import dataclasses
import math
from collections.abc import Callable, Iterator

from spec_jax.checkpoints.shape import Shape
from spec_jax.config import DTYPES, OFFLOADS, PLAN_QUANTIZATIONS, SamplingParams, check_choice
from spec_jax.drafters.draft_model import DraftModel
from spec_jax.errors import ConfigError
from spec_jax.models.sizes import WideShallow
from spec_jax.planning import cost
from spec_jax.planning.abstract import GREEDY
from spec_jax.planning.compiled import (
    CompiledProgram,
    compile_call,
    compile_prefill,
    compile_round,
    devices_for,
)
from spec_jax.planning.cost import Weights
from spec_jax.planning.pair import Job, Pair, check_context
from spec_jax.planning.plan_figures import Plan, Replicated
from spec_jax.sampling.parameters import SamplingFeatures
from spec_jax.sharding import ROLES, Layout


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
    sampling: SamplingParams = GREEDY,
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
      sampling: how rows sample; greedy by default.
      dtype: `float32` or `bfloat16`.
      quantization: of the matrices of both models: `none`, `int8` or `int4`.
      offload: `host` plans the target's blocks in host memory, from where every call streams them.
      resident_layers: how many of them, the first ones, stay on the chips.
      compile: ask the compiler for memory and collectives; minutes for a large model.
      on_progress: called with a line of text before each step that takes time.

    Raises:
      ConfigError: a value is out of range, the layout does not fit the models, or something that
        compiling needs is missing.
    """
    context = target.config.max_position if context is None else context
    _check(num_speculative_tokens, acceptance, batch, context)
    check_choice("dtype", dtype, DTYPES)
    check_choice("quantization", quantization, PLAN_QUANTIZATIONS)
    check_choice("offload", offload, OFFLOADS)
    if offload == "host" and layout.chip and layout.chip.host is None:
        raise ConfigError(
            f"offload is 'host', but layout {layout.name} does not say how fast a device reads "
            "host memory; add host_gb_per_s under [chip], such as 32 for PCIe 4.0 x16."
        )
    check_context(context, target)
    progress = on_progress or (lambda line: None)
    shapes, settings = (target, draft), (dtype, quantization, offload, resident_layers)
    progress("laying out the models")
    pair = Pair.of(shapes, layout, *settings)
    lookahead, features = num_speculative_tokens, SamplingFeatures.of([sampling])
    job = pair.job(batch, context, lookahead, features)
    sections = {
        "target_call": job.call(0, 1),
        "scoring": job.call(0, lookahead + 1),
        "draft_step": job.call(1, 1),
        "sampling": job.sampling,
        "round": job.round,
    }
    speedup = best = None
    if (plain := sections["target_call"].seconds) is not None:

        def round_seconds(lookahead: int) -> float:
            seconds = dataclasses.replace(job, lookahead=lookahead).round.seconds
            assert seconds is not None  # like the target call
            return seconds

        speedup = cost.speedup(acceptance, lookahead, plain, round_seconds)
        k = cost.best_lookahead(acceptance, plain, round_seconds)
        best = k, cost.speedup(acceptance, k, plain, round_seconds)
    prefill = job.prefill
    if compile:
        compilable = Pair.of(shapes, layout, *settings, devices=devices_for(layout))
        programs = _compile(dataclasses.replace(job, pair=compilable), sampling, progress)
        prefill = dataclasses.replace(prefill, program=programs.pop("prefill"))
        for name, program in programs.items():
            sections[name] = dataclasses.replace(sections[name], program=program)
    return Plan(
        target,
        draft,
        layout,
        *settings,
        batch=job.shapes.batch,
        capacity=job.shapes.capacity,
        num_speculative_tokens=lookahead,
        acceptance=acceptance,
        parameters=sampling,
        **sections,
        prefill=prefill,
        replicated=tuple(
            each
            for role, weights in zip(ROLES, pair.weights, strict=True)
            for each in _replicated(layout, role, weights)
        ),
        tokens_per_round=cost.tokens_per_round(acceptance, lookahead),
        speedup=speedup,
        best=best,
    )


def _compile(
    job: Job, sampling: SamplingParams, progress: Callable[[str], object]
) -> dict[str, CompiledProgram]:
    (target, draft), shapes, dtype = job.pair.models, job.shapes, job.pair.cache_dtype
    drafter, programs = DraftModel(draft, job.lookahead), {}
    for name, compile in {
        "target_call": lambda: compile_call(target, shapes, 1, dtype),
        "scoring": lambda: compile_call(target, shapes, job.lookahead + 1, dtype),
        "draft_step": lambda: compile_call(draft, shapes, 1, dtype),
        "round": lambda: compile_round(target, drafter, shapes, sampling),
        "prefill": lambda: compile_prefill(target, drafter, shapes),
    }.items():
        progress(f"compiling the {name.replace('_', ' ')}")
        programs[name] = compile()
    return programs


def _check(lookahead: int, acceptance: float, batch: int, context: int) -> None:
    counts = {"num_speculative_tokens": lookahead, "batch": batch, "context": context}
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; give at least 1.")
    if not 0 <= acceptance <= 1:
        raise ConfigError(f"acceptance is {acceptance}; give a probability, such as 0.8.")


def _replicated(layout: Layout, role: str, weights: Weights) -> Iterator[Replicated]:
    mesh, sizes = dict(layout.mesh), weights.config.axis_sizes
    for axis, rule in getattr(layout, role):
        requested, num_shards = math.prod(mesh[name] for name in rule.axes), weights.shards(axis)
        if axis in sizes and num_shards < requested:
            yield Replicated(role, axis, sizes[axis], requested, num_shards)
