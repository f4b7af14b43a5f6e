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
from spec_jax.models.model import Model

PREFILL, DECODE = "the reading of prompts", "the decoding loop"
START, COPY, CHUNK = "empty rows", "the copy of a prefix", "the reading of a chunk"
EMPTY, INSERT, GROW = "an empty batch", "the insertion of rows", "a larger batch"
DRAFT, VERIFY, LIMITS = "drafting", "verification", "limits"
"""The programs of a batch shape, as progress names them."""


MAX_PROGRAMS = 128
"""Programs kept: about six for each shape of a batch; few shapes are in use.

A program of a large model takes megabytes, on the host and on an accelerator.
"""


MAX_MAPS = 0.75
"""Past this share of the memory maps of a process, the least recently used programs are dropped.

On CPU each kernel of a program has separate maps: the loop of a model of 30 layers has 800, and
Linux allows 65,530 by default. Past this limit nothing is compiled, and allocations fail.
"""
MIN_PROGRAMS = 16
"""Programs that are always kept: a few shapes of batches need them."""
LARGE_PROGRAM_SECONDS = 0.25
"""A program that takes longer leaves much freed memory behind: for the loop of a pair of 28 and 24
layers 0.4 GiB compiled, 0.09 read from a disk."""


def maps_taken() -> float:
    """The share of the allowed memory maps that this process has; 0 if the system counts none."""
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
        with Path("/proc/self/maps").open("rb") as maps:
            return sum(1 for _ in maps) / limit
    return 0.0


class Program:
    """A compiled program; it takes the arguments that it was compiled for.

    Attributes:
      compiled: what JAX calls. A held argument is the tuple of its arrays there: to take the
        hundreds of nodes of a model apart would cost milliseconds in every call.
    """

    def __init__(self, compiled: jax.stages.Compiled, held: "Held"):
        self.compiled, self._held = compiled, held

    def __call__(self, *args: Any) -> Any:
        """Runs it."""
        return self.compiled(*map(self._held.flat, args))


class Held:
    """Arguments that are the same objects in many calls, such as a model, and their arrays."""

    def __init__(self) -> None:
        self._flat: dict[int, tuple[Any, tuple[Any, ...], Any]] = {}

    def add(self, tree: Any) -> None:
        """Holds an argument."""
        leaves, structure = jax.tree.flatten(tree)
        self._flat[id(tree)] = tree, tuple(leaves), structure

    def flat(self, arg: Any) -> Any:
        """The arrays of a held argument; any other one as it is."""
        held = self._flat.get(id(arg))
        return arg if held is None else held[1]

    def restore(self, args: tuple, arrays: tuple) -> list[Any]:
        """What a traced function wants in place of `arrays`, which stand for `args`."""
        structures = [self._flat[id(arg)][2] if id(arg) in self._flat else None for arg in args]
        return [
            each if structure is None else jax.tree.unflatten(structure, each)
            for structure, each in zip(structures, arrays, strict=True)
        ]


class Compiler:
    """Compiles programs for a target's devices, and keeps the programs used last.

    Args:
      target: the target.
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
        self._programs: OrderedDict[tuple[str, Hashable], Program] = OrderedDict()
        self.held = Held()

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
        like: Any = None,
    ) -> Program:
        """The compiled program for `key`, compiled at its first use.

        Args:
          key: its name, and everything that its shapes depend on.
          function: what to compile.
          args: arguments of the shapes that it will be called with.
          static: further arguments, known when it is compiled.
          donate: which of `args` it may overwrite.
          like: arrays in whose place its results come, sharded like them; by default the compiler
            chooses shardings.
        """
        if key not in self._programs:
            self._on_progress(f"compiling {key[0]}")
            begin = time.perf_counter()

            def counted(*flat: Any) -> Any:
                self.traces += 1
                count = len(args)
                return function(*self.held.restore(args, flat[:count]), *flat[count:])

            jitted = self._target.jit(
                counted,
                static_argnums=tuple(range(len(args), len(args) + len(static))),
                donate_argnums=donate,
                out_shardings=shardings(like),
            )
            flat = map(self.held.flat, args)
            self._programs[key] = Program(jitted.lower(*flat, *static).compile(), self.held)
            took = time.perf_counter() - begin
            self.seconds += took
            if took > LARGE_PROGRAM_SECONDS:
                host_memory.give_back()
            self._drop()
        self._programs.move_to_end(key)
        return self._programs[key]

    def _drop(self) -> None:
        """Drops the least recently used programs while there are too many."""
        num_before = len(self._programs)
        while len(self._programs) > MAX_PROGRAMS or (
            len(self._programs) > MIN_PROGRAMS and maps_taken() > MAX_MAPS
        ):
            self._programs.popitem(last=False)
        if len(self._programs) < num_before:
            host_memory.give_back()

    def names(self) -> list[tuple[str, Hashable]]:
        """Name and shapes of each program that is kept, the one used last at the end."""
        return list(self._programs)

    def programs(self, name: str) -> list[jax.stages.Compiled]:
        """The programs of a name that are kept."""
        return [each.compiled for key, each in self._programs.items() if key[0] == name]

    def clear(self) -> None:
        """Drops all programs."""
        self._programs.clear()

    def texts(self) -> list[str]:
        """The text (HLO) of each program that is kept, as the compiler optimised it."""
        return [each.compiled.as_text() or "" for each in self._programs.values()]

    def memory(self, name: str) -> tuple[int, int]:
        """Bytes of the arguments, and of everything, for the largest program of a name."""
        needed = taken = 0
        for program in self.programs(name):
            size: Any = program.memory_analysis()
            arguments = size.argument_size_in_bytes
            taken = max(taken, arguments + bytes_beside_arguments(program))
            needed = max(needed, arguments)
        return needed, taken


def bytes_beside_arguments(program: jax.stages.Compiled) -> int:
    """Bytes that a program takes on each device: its new results and temporaries."""
    size: Any = program.memory_analysis()
    return size.output_size_in_bytes - size.alias_size_in_bytes + size.temp_size_in_bytes


def shardings(tree: Any) -> Any:
    """The shardings of a tree of arrays; None stays None."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)
