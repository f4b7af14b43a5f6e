"""Makes plans: shards the models, counts, and runs the compiler on request."""

import dataclasses
import math
from collections.abc import Callable, Iterator

from spec_jax.checkpoints.shape import Shape
from spec_jax.config import DTYPES, OFFLOADS, PLAN_QUANTIZATIONS, SamplingParams, check_choice
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
from spec_jax.planning.pair import Job, Pair, check_context, check_drafting
from spec_jax.planning.plan_figures import CALLS, Plan, Replicated
from spec_jax.sampling.parameters import SamplingFeatures
from spec_jax.sharding import Layout


def derived_draft(target: Shape, layout: Layout) -> Shape:
    """A wide and shallow draft for a target, whose heads are sharded if the target's can be."""
    rule = dict(layout.draft).get("heads")
    mesh, heads = dict(layout.mesh), target.config.num_heads
    num_shards = math.prod(mesh[axis] for axis in rule.axes) if rule else 1
    shape = WideShallow(num_shards=num_shards if heads % num_shards == 0 else 1)(target.config)
    return Shape(f"a wide and shallow draft of {target.name}", shape)


def make_plan(
    target: Shape,
    draft: Shape | None,
    layout: Layout,
    *,
    method: str = "draft_model",
    early_exit_layers: int | None = None,
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
    """Plans a target and how it is drafted for on a layout.

    Args:
      target: the target's shape.
      draft: the draft model's; None for the other methods.
      layout: the layout; without figures of its chip no time is projected.
      method: one of `draft_model`, `early_exit`, `prompt_lookup` and `none`, which is plain
        decoding.
      early_exit_layers: the first layers, which draft by `early_exit`; a quarter by default.
      num_speculative_tokens: draft tokens of a round (K).
      acceptance: the probability that a draft token is accepted.
      batch: rows decoded together.
      context: most tokens of prompt and completion together; the target's own by default.
      sampling: how rows sample; greedy by default.
      dtype: `float32` or `bfloat16`.
      quantization: of the matrices of both models: `none`, `int8`, `int4`, or `gguf` for the blocks
        of .gguf files, as XLA multiplies them; a draft that is not one is not quantized then.
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
    exits = check_drafting(target, draft, method, early_exit_layers)
    progress = on_progress or (lambda line: None)
    models, settings = (target, draft, layout), (dtype, quantization, offload, resident_layers)
    drafting = {"method": method, "exit_layers": exits}
    progress("laying out the models")
    pair = Pair.of(*models, *settings, **drafting)
    lookahead = 0 if method == "none" else num_speculative_tokens
    job = pair.job(batch, context, lookahead, SamplingFeatures.of([sampling]))
    sections = {name: getattr(job, name) for name in CALLS}
    speedup = best = None
    if lookahead and (plain := job.target_call.seconds) is not None:

        def round_seconds(lookahead: int) -> float:
            seconds = dataclasses.replace(job, lookahead=lookahead).round.seconds
            assert seconds is not None  # like the target call
            return seconds

        speedup = cost.speedup(acceptance, lookahead, plain, round_seconds)
        k = cost.best_lookahead(acceptance, plain, round_seconds)
        best = k, cost.speedup(acceptance, k, plain, round_seconds)
    prefill = job.prefill
    if compile:
        compilable = Pair.of(*models, *settings, **drafting, devices=devices_for(layout))
        programs = _compile(dataclasses.replace(job, pair=compilable), sampling, progress)
        prefill = dataclasses.replace(prefill, program=programs.pop("prefill"))
        for name, program in programs.items():
            sections[name] = dataclasses.replace(sections[name], program=program)
    roles = {"target": pair.weights, "draft": pair.drafting if draft else None}
    return Plan(
        *models,
        *settings,
        method=method,
        exit_layers=exits,
        batch=job.shapes.batch,
        capacity=job.shapes.capacity,
        num_speculative_tokens=lookahead,
        acceptance=acceptance,
        parameters=sampling,
        **sections,
        prefill=prefill,
        replicated=tuple(
            each
            for role, weights in roles.items()
            if weights is not None
            for each in _replicated(layout, role, weights)
        ),
        tokens_per_round=cost.tokens_per_round(acceptance, lookahead),
        speedup=speedup,
        best=best,
    )


def _compile(
    job: Job, sampling: SamplingParams, progress: Callable[[str], object]
) -> dict[str, CompiledProgram]:
    """Each model's calls, the round and prefill; of a target's layers only the round has calls."""
    target, draft, shapes, dtype = job.pair.target, job.pair.draft, job.shapes, job.pair.cache_dtype
    drafter, programs = job.pair.drafter(job.lookahead), {}
    compilers = {"target_call": lambda: compile_call(target, shapes, 1, dtype)}
    if not job.pair.exit_layers:
        compilers["scoring"] = lambda: compile_call(target, shapes, job.lookahead + 1, dtype)
    if draft is not None:
        compilers["draft_step"] = lambda: compile_call(draft, shapes, 1, dtype)
    compilers["round"] = lambda: compile_round(target, drafter, shapes, sampling)
    compilers["prefill"] = lambda: compile_prefill(target, drafter, shapes)
    for name, compile in compilers.items():
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
