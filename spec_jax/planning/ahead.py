"""Compiles what an engine will run, from shapes alone, for devices that need not exist here.

JAX keeps a compiled program under a key made of the program, the kinds and order of its devices,
the versions of jaxlib and of the platform's compiler, and its flags. The process that decodes finds
it there if all of these are the same.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from spec_jax.checkpoints import Checkpoint
from spec_jax.checkpoints.byte_tokenizer import byte_tokenizer
from spec_jax.checkpoints.shape import Shape
from spec_jax.config import (
    DTYPES,
    KV_CACHE_DTYPES,
    PLAN_METHODS,
    PLAN_QUANTIZATIONS,
    DraftModelConfig,
    SamplingParams,
    SpeculativeConfig,
    check_choice,
    check_integer,
)
from spec_jax.engine.compile_cache import find_anywhere
from spec_jax.engine.custom import DrafterSetting
from spec_jax.engine.draft_models import with_frequent_outputs
from spec_jax.engine.methods import make_engine
from spec_jax.engine.requests import Request
from spec_jax.errors import ConfigError
from spec_jax.planning.abstract import abstract_model, check_forms
from spec_jax.planning.compiled import ShapeCompiler, devices_for
from spec_jax.planning.pair import check_context
from spec_jax.sharding import Layout

STOP = (0,)
"""Some token. Which ones end a text makes no difference to a program, nor how many up to eight."""


@dataclass(frozen=True)
class Workload:
    """The requests that programs are compiled for: the prompts of one call of `LLM.generate`.

    `prompt_tokens` is the length of the longest prompt; the sampling says how long each becomes.
    """

    prompt_tokens: int
    sampling: SamplingParams
    num_prompts: int = 1
    max_num_seqs: int = 8


class Compilation(NamedTuple):
    """The number of compiled programs, and the seconds that it took."""

    programs: int
    seconds: float


class _AheadCompiler(ShapeCompiler):
    """Compiles as an engine's compiler does; programs only say their results."""

    def program(self, key: tuple[str, Hashable], *args: Any, **options: Any) -> Any:
        results = jax.tree.map(
            lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=each.sharding),
            super().program(key, *args, **options).compiled.out_info,
        )
        return lambda *_: results


def compile_ahead(
    target: Shape,
    draft: Shape | None,
    layout: Layout,
    speculation: SpeculativeConfig,
    workloads: Sequence[Workload],
    *,
    dtype: str = "bfloat16",
    quantization: str = "none",
    kv_cache_dtype: str = "auto",
    max_model_len: int | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Compilation:
    """Compiles the programs that `LLM.generate` runs for some workloads.

    JAX keeps them where `jax_compilation_cache_dir` says. Each workload is decoded by one call, and
    further options are like `LLM`'s; `quantization` is anything but `auto`. The draft is None
    if the method has none, and the same object as the target if it is the target itself.

    Raises:
      ConfigError: a value is out of range, the layout does not fit the models, something that
        compiling needs is missing, a prompt is longer than the context, or the method's programs
        depend on more than shapes.
    """
    check_choice("dtype", dtype, DTYPES)
    check_choice("quantization", quantization, PLAN_QUANTIZATIONS)
    check_choice("kv_cache_dtype", kv_cache_dtype, KV_CACHE_DTYPES)
    if layout.platform == "gpu":
        raise ConfigError(
            f"layout {layout.name} is for GPUs, whose compiler measures on them; let the first job "
            "compile."
        )
    _check(target, speculation)
    check_forms(quantization, target)
    context = max_model_len or target.config.max_position
    check_context(context, target)
    for workload in workloads:
        for name in ("prompt_tokens", "num_prompts", "max_num_seqs"):
            check_integer(name, getattr(workload, name), 1)
        if workload.prompt_tokens > context:
            raise ConfigError(
                f"prompt_tokens is {workload.prompt_tokens}, but the context is {context}; give "
                "at most that."
            )
    devices = devices_for(layout)
    # No text is read: any tokenizer will do that both models share.
    tokenizer = byte_tokenizer(target.config.vocab_size)

    def checkpoint(role: str, shape: Shape, rounded: str) -> Checkpoint:
        placement = layout.place(role, shape.config.axis_sizes, devices)
        model = abstract_model(shape.config, dtype, rounded, placement, shape.forms)
        model = dataclasses.replace(model, rounds_cache=kv_cache_dtype == "int8")
        return Checkpoint(model.with_max_length(context), tokenizer, STOP, shape.name)

    def load_draft() -> Checkpoint:
        assert draft is not None  # the caller has read it
        rounded = speculation.draft_quantization or quantization
        is_target = draft is target and rounded == quantization
        loaded = target_checkpoint if is_target else checkpoint("draft", draft, rounded)
        return with_frequent_outputs(loaded, speculation)

    find_anywhere(layout.platform or "cpu")
    target_checkpoint = checkpoint("target", target, quantization)
    engine, _ = make_engine(DrafterSetting(speculation, target_checkpoint, load_draft), context)
    engine.cost_profiler = None  # it times programs, and adds none
    compiler = engine.compiler = _AheadCompiler(target_checkpoint.model, on_progress)
    for workload in workloads:
        prompt, rows = workload.prompt_tokens, workload.max_num_seqs
        # One more than the rows stands for however many wait. No prompt begins like another.
        requests = [
            Request(
                prompt_token_ids=[row] * prompt,
                sampling=workload.sampling,
                key=np.zeros((2,), np.uint32),
                stop_token_ids=STOP,
                max_length=min(prompt + workload.sampling.token_limit, context),
            )
            for row in range(min(workload.num_prompts, rows + 1))
        ]
        # Like a scheduler, until rows have finished and others take a slot: the last ones begin
        # with different tokens and with the tokens of a row before them.
        batch = engine.open(requests, rows)
        slots = batch.slots(min(rows, len(requests)))
        batch.insert(dict(zip(slots, requests, strict=False)))
        batch.compile_rounds()
        if len(requests) > rows:
            for _ in range(2):
                batch.insert({slots[0]: requests[-1]})
    return Compilation(compiler.traces, compiler.seconds)


def _check(target: Shape, speculation: SpeculativeConfig) -> None:
    """Refuses what depends on more than shapes: on tokenizers, on times, on code of others."""
    if target.config.encoder is not None:
        raise ConfigError(
            f"{target.name} has an encoder, and only decoders can be compiled ahead; let the first "
            "job compile."
        )
    if speculation.method not in PLAN_METHODS:
        raise ConfigError(
            f"method is {speculation.method!r}, whose programs depend on more than the models' "
            f"shapes; those that can be compiled ahead are {', '.join(PLAN_METHODS)}."
        )
    if speculation.draft_quantization not in (None, *PLAN_QUANTIZATIONS):
        raise ConfigError(
            f"draft_quantization is {speculation.draft_quantization!r}, which depends on what is "
            f"stored; choose one of {', '.join(PLAN_QUANTIZATIONS)}."
        )
    if isinstance(speculation, DraftModelConfig) and speculation.draft_vocab_size is not None:
        raise ConfigError(
            f"draft_vocab_size is {speculation.draft_vocab_size}, and only the draft's tokenizer "
            "knows which tokens these are; leave it out to compile ahead."
        )
