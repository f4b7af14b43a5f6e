"""Compiled programs: each is compiled once, at its first use; compile time is kept separately."""

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spec_jax import host_memory
from spec_jax.decoding import loop
from spec_jax.decoding.state import DecodeState
from spec_jax.drafters.base import Draft, Drafter
from spec_jax.models.model import Model
from spec_jax.sampling.parameters import BatchSampling

PREFILL, DECODE = "the reading of prompts", "the decoding loop"
EMPTY, JOIN = "an empty batch", "the joining of rows"
DRAFT, VERIFY, LIMITS = "drafting", "verification", "limits"
"""The programs of a bucket, as progress names them."""


MOST_PROGRAMS = 128
"""Programs kept: about five for each bucket of prompts, answers and rows; few buckets are in use.

A program of a large model takes megabytes, on the host and on an accelerator.
"""


MOST_MAPS = 0.75
"""The share of a process's memory maps past which the programs used least lately are dropped.

On CPU each kernel of a program has maps of its own: 800 for the loop of a model of 30 layers, of
65,530 that Linux allows by default. Past that nothing is compiled, and allocations fail.
"""
FEWEST_PROGRAMS = 16
"""Programs kept all the same, whatever else takes maps: a few buckets of requests need them."""


def _maps_taken() -> float:
    """The share that this process has of the memory maps it may have; 0 if nobody counts them."""
    with contextlib.suppress(OSError, ValueError):
        most = int(Path("/proc/sys/vm/max_map_count").read_text())
        with Path("/proc/self/maps").open("rb") as maps:
            return sum(1 for _ in maps) / most
    return 0.0


class Compiler:
    """Compiles programs for a target's devices, and keeps those used last.

    Args:
      target: whose devices.
      on_progress: called with a line of text before a program is compiled.
    """

    def __init__(self, target: Model, on_progress: Callable[[str], None] | None = None):
        self.vocab_size, self.placement = target.config.vocab_size, target.placement
        self.traces = 0
        """How many programs were traced so far."""
        self.seconds = 0.0
        """Seconds spent compiling so far."""
        self._target = target
        self._on_progress = on_progress or (lambda message: None)
        self._programs: OrderedDict[tuple[str, Hashable], jax.stages.Compiled] = OrderedDict()

    def put(self, tree: Any) -> Any:
        """Arrays of one entry a row, on the target's devices."""

        def put(leaf: Any) -> jax.Array:
            return self.placement.put(leaf, "batch", *(None,) * (np.ndim(leaf) - 1))

        return jax.tree.map(put, tree)

    def program(
        self,
        key: tuple[str, Hashable],
        function: Callable,
        args: tuple,
        static: tuple = (),
        donate: tuple[int, ...] = (),
        out_shardings: Any = None,
    ) -> jax.stages.Compiled:
        """The compiled program for `key`, compiled at its first use.

        Args:
          key: its name, and everything that its shapes depend on.
          function: what to compile.
          args: arguments of the shapes that it will be called with.
          static: further arguments, known when it is compiled.
          donate: which of `args` it may overwrite.
          out_shardings: shardings of its results; by default the compiler chooses.
        """
        if key not in self._programs:
            self._on_progress(f"compiling {key[0]}")
            begin = time.perf_counter()

            def counted(*args: Any) -> Any:
                self.traces += 1
                return function(*args)

            jitted = self._target.jit(
                counted,
                static_argnums=tuple(range(len(args), len(args) + len(static))),
                donate_argnums=donate,
                out_shardings=out_shardings,
            )
            self._programs[key] = jitted.lower(*args, *static).compile()
            self.seconds += time.perf_counter() - begin
            self._drop()
        self._programs.move_to_end(key)
        return self._programs[key]

    def _drop(self) -> None:
        """Drops the programs that were not used for longest, if there are too many."""
        kept = len(self._programs)
        while len(self._programs) > MOST_PROGRAMS or (
            len(self._programs) > FEWEST_PROGRAMS and _maps_taken() > MOST_MAPS
        ):
            self._programs.popitem(last=False)
        if len(self._programs) < kept:
            host_memory.give_back()

    def texts(self) -> list[str]:
        """The text (HLO) of each program that is kept, as the compiler optimised it."""
        return [program.as_text() or "" for program in self._programs.values()]

    def memory(self, name: str) -> tuple[int, int]:
        """Bytes of the arguments, and of everything, for the largest program of a name."""
        needed = taken = 0
        for (known, _), program in self._programs.items():
            if known == name:
                size: Any = program.memory_analysis()
                arguments = size.argument_size_in_bytes
                taken = max(taken, arguments + bytes_beside_arguments(program))
                needed = max(needed, arguments)
        return needed, taken


class Rounds:
    """The compiled rounds of one bucket, whole or in pieces.

    Args:
      compiler: compiles them.
      models: the target and the drafter.
      strategy: how they are used.

    Attributes:
      key: everything that the shapes depend on; set when the first rows join.
      sampling: the batch's parameters; they change whenever rows join.
    """

    key: Hashable
    sampling: BatchSampling

    def __init__(
        self,
        compiler: Compiler,
        models: tuple[Model, Drafter],
        strategy: loop.Strategy,
    ):
        self.compiler, self.strategy = compiler, strategy
        self._target, self._drafter = models

    def decode(self, state: DecodeState, rounds: int, min_running: int = 1) -> DecodeState:
        """At most `rounds` rounds on the device, while at least `min_running` rows run."""

        def function(target: Model, drafter: Drafter, state, sampling, *limits) -> DecodeState:
            return loop.decode(target, drafter, self.strategy, state, sampling, *limits)

        limits = np.int32(rounds), np.int32(min_running)
        args = (self._target, self._drafter, state, self.sampling, *limits)
        return self._program(DECODE, function, args, donate=2, out=shardings(state))(*args)

    def limits(self, state: DecodeState) -> tuple[jax.Array, jax.Array | None]:
        """Most tokens that each row may draft next, and its confidence threshold."""

        def function(state: DecodeState):
            return loop.limits(self.strategy.draft_length, state)

        return self._program(LIMITS, function, (state,))(state)

    def propose(self, state: DecodeState) -> tuple[Draft, DecodeState]:
        """The drafting of a round."""

        def function(drafter: Drafter, state: DecodeState, sampling: BatchSampling):
            return loop.propose(drafter, self.strategy.draft_length, state, sampling)

        args = (self._drafter, state, self.sampling)
        return self._program(DRAFT, function, args, donate=1)(*args)

    def finish(
        self, state: DecodeState, draft: Draft, allowed: np.ndarray | None = None
    ) -> DecodeState:
        """The rest of a round; `allowed` are packed sets of tokens for each position, or None."""

        def function(target: Model, drafter: Drafter, state, draft, sampling, allowed):
            return loop.finish_round(
                target, drafter, self.strategy, state, draft, sampling, allowed
            )

        masks = self.compiler.put(allowed)
        args = (self._target, self._drafter, state, draft, self.sampling, masks)
        out, masked = shardings(state), allowed is not None
        return self._program(VERIFY, function, args, donate=2, out=out, more=masked)(*args)

    def _program(
        self,
        name: str,
        function: Callable,
        args: tuple,
        donate: int | None = None,
        out: Any = None,
        more: Hashable = None,
    ) -> Callable:
        donated = () if donate is None else (donate,)
        return self.compiler.program(
            (name, (self.key, more)), function, args, donate=donated, out_shardings=out
        )


def bytes_beside_arguments(program: jax.stages.Compiled) -> int:
    """Bytes that a program takes on each device: its new results and temporaries."""
    size: Any = program.memory_analysis()
    return size.output_size_in_bytes - size.alias_size_in_bytes + size.temp_size_in_bytes


def shardings(state: Any) -> Any:
    """The shardings of a state: the result of one call is the argument of the next."""
    return jax.tree.map(lambda leaf: leaf.sharding, state)
