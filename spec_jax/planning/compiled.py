"""Compiles the programs of a plan ahead of time, for devices that need not exist here."""

import dataclasses
import importlib.util
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from spec_jax.config import SamplingParams
from spec_jax.decoding import loop
from spec_jax.decoding.draft_length import Constant
from spec_jax.decoding.state import DecodeState
from spec_jax.drafters.base import Drafter
from spec_jax.engine.batch_shape import BatchShape
from spec_jax.engine.programs import DECODE, PREFILL, Compiler, bytes_beside_arguments, shardings
from spec_jax.engine.requests import PADDING
from spec_jax.engine.rounds import Rounds
from spec_jax.engine.rows import RowPrograms
from spec_jax.errors import ConfigError, is_out_of_memory
from spec_jax.models.model import Model
from spec_jax.planning.abstract import abstract_cache, abstract_tokens, placed
from spec_jax.planning.hlo import Collective, by_kind, collectives
from spec_jax.sampling.parameters import SamplingFeatures
from spec_jax.sharding import Layout

_LIBTPU = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is opened, so other processes are not disturbed
    "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask for a slice
    # libtpu needs some host type to start; the topology to compile for is given separately.
    "TPU_ACCELERATOR_TYPE": "v4-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

SAMPLED = SamplingParams(temperature=1.0)


@dataclass(frozen=True)
class CompiledProgram:
    """The compiler's figures of a program, on each chip.

    Attributes:
      memory_bytes: arguments, results that do not reuse an argument's buffer, temporaries and code;
        None if the compiler refuses the program because it does not fit.
      argument_bytes: the weights, the caches and small arguments.
      host_bytes: arguments in host memory, which `memory_bytes` does not count.
      aliased_bytes: arguments whose buffers the results reuse.
      collectives: how often each runs, with the branch that has the most in every conditional; for
        one round of the decoding loop, or one block of the prompts in prefill. Each width counts
        that a round chooses among to score, as with `prompt_lookup`.
      least_collectives: the same with the branches that have the fewest, for example of greedy rows
        without processors.
      compile_seconds: tracing and compiling.
      refusal: why it was refused, or empty.
      text: the optimised program, as the compiler prints it.
    """

    memory_bytes: int | None
    argument_bytes: int
    temporary_bytes: int
    aliased_bytes: int
    collectives: Counter[Collective]
    least_collectives: Counter[Collective]
    compile_seconds: float
    host_bytes: int = 0
    refusal: str = ""
    text: str = field(default="", repr=False)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        names = ("argument_bytes", "temporary_bytes", "aliased_bytes", "compile_seconds")
        return {
            "memory_bytes_per_chip": self.memory_bytes,
            "host_bytes_per_chip": self.host_bytes,
            **{name: getattr(self, name) for name in names},
            "collectives": by_kind(self.collectives),
            "least_collectives": by_kind(self.least_collectives),
            "refusal": self.refusal or None,
        }


def devices_for(layout: Layout) -> Sequence[Any]:
    """The devices to compile for: of this machine, or of a TPU slice that need not exist.

    Raises:
      ConfigError: this machine lacks the layout's devices, or libtpu.
    """
    if layout.platform == "tpu":
        return _tpu_slice(layout)
    platform = layout.platform or "cpu"
    try:
        devices = jax.devices(platform)
    except RuntimeError:
        devices = []
    if len(devices) < layout.size:
        remedy = (
            f"set JAX_NUM_CPU_DEVICES={layout.size} before starting Python"
            if platform == "cpu"
            else "compile where they are, or plan without compiling"
        )
        raise ConfigError(
            f"compiling for the layout {layout.name} takes {layout.size} {platform} devices, and "
            f"there are {len(devices)}; {remedy}."
        )
    return devices[: layout.size]


def _tpu_slice(layout: Layout) -> Sequence[Any]:
    topology = layout.chip.topology if layout.chip else None
    if topology is None:
        raise ConfigError(
            f"layout {layout.name} does not name the slice to compile for; add its topology under "
            '[chip], such as topology = "v4:2x2x4".'
        )
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            "compiling for a TPU needs libtpu, which also works on a machine without a TPU: "
            'pip install "spec-jax[tpu]".'
        )
    for name, value in _LIBTPU.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    # A v4 chip's two cores are one device.
    options: dict[str, Any] = {"chip_config_name": "megacore"} if topology.startswith("v4:") else {}
    if layout.slices > 1:
        options["num_slices"] = layout.slices
    try:
        return topologies.get_topology_desc(topology, "tpu", **options).devices
    except Exception as error:  # libtpu has no specific exception for a wrong name
        raise ConfigError(
            f"layout {layout.name}: libtpu does not describe the topology {topology!r} ({error}); "
            'write one such as "v4:2x2x4".'
        ) from None


def compile_call(
    model: Model, shapes: BatchShape, tokens: int, cache_dtype: Any
) -> CompiledProgram:
    """A call over `tokens` new tokens of each row, whose cache is updated in place."""
    headroom = max(shapes.block, tokens)
    cache = abstract_cache(model, shapes.batch, shapes.capacity, cache_dtype, headroom)
    words = abstract_tokens(model, shapes.batch, tokens)

    def call(model: Model, words: jax.Array, cache: Any):
        return model.score(words, cache)

    return _compile(model.jit(call, donate_argnums=2), model, words, cache)


class ShapeCompiler(Compiler):
    """An engine's compiler for a run without data: arrays are their shapes and shardings."""

    def put(self, tree: Any) -> Any:
        """The shapes of arrays of one entry a row."""

        def shape(leaf: Any) -> jax.ShapeDtypeStruct:
            axes = ("batch", *(None,) * (np.ndim(leaf) - 1))
            return jax.eval_shape(lambda: leaf).update(sharding=self.placement.sharding(*axes))

        return jax.tree.map(shape, tree)


class _PlanCompiler(ShapeCompiler):
    """Compiles the programs of a name, and says of other ones the results alone."""

    compiled: CompiledProgram

    def __init__(self, target: Model, drafter: Drafter, name: str = ""):
        super().__init__(target)
        self._drafter, self._name = drafter, name

    def program(
        self,
        key: tuple[str, Any],
        function: Callable,
        args: tuple,
        static: tuple = (),
        donate: tuple[int, ...] = (),
        like: Any = None,
    ) -> Any:
        if key[0] == self._name:
            # Prefill does not read the heads, but they take memory too.
            jitted = self._target.jit(
                function,
                keep_unused=key[0] == PREFILL,
                donate_argnums=donate,
                out_shardings=shardings(like),
            )
            self.compiled = _compile(jitted, *args)
        state = jax.eval_shape(function, *args)
        parts, structure = jax.tree.flatten(state, is_leaf=lambda part: part is state.drafter)
        drafting = getattr(self._drafter, "model", self._target)
        models = (drafting if part is state.drafter else self._target for part in parts)
        state = structure.unflatten(map(placed, models, parts))
        return lambda *_: state


def _programs(compiler: _PlanCompiler, target: Model, drafter: Drafter) -> RowPrograms:
    strategy = loop.Strategy(Constant(drafter.lookahead))
    return RowPrograms(compiler, target, drafter, strategy, lambda *_: None)


def abstract_state(target: Model, drafter: Drafter, shapes: BatchShape) -> DecodeState:
    """The shapes of the state that an engine's programs take and return."""
    return _programs(_PlanCompiler(target, drafter), target, drafter).start([], shapes).state


def compile_round(
    target: Model, drafter: Drafter, shapes: BatchShape, sampling: SamplingParams = SAMPLED
) -> CompiledProgram:
    """The decoding loop as an engine compiles it, with the whole state donated."""
    compiler = _PlanCompiler(target, drafter, DECODE)
    programs = _programs(compiler, target, drafter)
    features = SamplingFeatures.of([sampling])
    shapes = dataclasses.replace(shapes, stops=0, bad_words=(0, 0), features=features)
    rows = programs.start([dataclasses.replace(PADDING, sampling=sampling)] * shapes.batch, shapes)
    Rounds(programs, shapes, rows.sampling).decode(rows.state, 1)
    return compiler.compiled


def compile_prefill(target: Model, drafter: Drafter, shapes: BatchShape) -> CompiledProgram:
    """Prefill of all models as an engine compiles it; it creates the caches."""
    compiler = _PlanCompiler(target, drafter, PREFILL)
    _programs(compiler, target, drafter).prefill([], shapes)
    return compiler.compiled


def _compile(jitted: Any, *args: Any) -> CompiledProgram:
    begin = time.perf_counter()
    lowered = jitted.lower(*args)
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        seconds = time.perf_counter() - begin
        why = str(error).splitlines()[0]
        return CompiledProgram(None, 0, 0, 0, Counter(), Counter(), seconds, refusal=why)
    seconds = time.perf_counter() - begin
    size, text = program.memory_analysis(), program.as_text()
    return CompiledProgram(
        memory_bytes=size.argument_size_in_bytes
        + bytes_beside_arguments(program)
        + size.generated_code_size_in_bytes,
        argument_bytes=size.argument_size_in_bytes,
        temporary_bytes=size.temp_size_in_bytes,
        aliased_bytes=size.alias_size_in_bytes,
        collectives=collectives(text),
        least_collectives=collectives(text, branch=min),
        compile_seconds=seconds,
        host_bytes=size.host_argument_size_in_bytes,
        text=text,
    )
