"""Programs of tests run once or twice, so XLA compiles them quickly and they run slower.

On CPU this takes less than half of the processor time. Tests that read a compiled program, and
those that decode real weights for long, compile as users do.
"""

import functools
import os
import types
import zlib
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache, lru_cache

from spec_jax.engine import cost_profiling, engine
from spec_jax.models.model import Model

_QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_cpu_use_fusion_emitters": False,  # MLIR takes longer than all the rest
}
XLA_DEFAULTS: dict[str, Any] = {
    "xla_backend_optimization_level": 3,
    "xla_cpu_parallel_codegen_split_count": 32,
    "xla_cpu_use_fusion_emitters": True,
}
"""What the flags above are without us."""

optimized_jit = functools.partial(jax.jit, compiler_options=XLA_DEFAULTS)
"""`jax.jit` for what a test runs so often that it pays: a million draws."""

_chosen = Model.compiler_options

OPTIMIZED = property(lambda model: {**XLA_DEFAULTS, **_chosen.__get__(model)})
"""The options of users' programs, in the place of `Model.compiler_options`."""


def _options(model: Model) -> dict[str, Any]:
    tiny = model.config.embed_size < 256
    return (_chosen if tiny else OPTIMIZED).__get__(model)


def compile_quickly() -> None:
    """Sets XLA's flags, in this process and those it starts; real weights stay optimized here."""
    flags = [f"--{name}={value}".lower() for name, value in _QUICK.items()]
    given = os.environ.get("XLA_FLAGS", "").split()
    os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys([*flags, *given]))  # a later flag wins
    Model.compiler_options = property(_options)


measured_seconds = cost_profiling._Samples._quickest
"""What a choice of K takes by its samples."""


def draft_as_if_it_were_free() -> None:
    """Adaptive policies, the default, draft in tests, and the same in every run.

    On tiny models drafting seldom pays, and what pays would differ from run to run.
    """
    cost_profiling._Samples._quickest = lambda self, samples: 1.0
    engine.costs_file = lambda *choices: None  # type: ignore[assignment]


def bound_cache() -> None:
    """Removes the oldest programs of a cache that has become too large."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    max_size = jax.config.values["jax_compilation_cache_max_size"]
    if not folder or max_size < 0:
        return
    programs = [(path, path.stat()) for path in Path(folder).glob("*-cache")]
    size = sum(stat.st_size for _, stat in programs)
    for path, stat in sorted(programs, key=lambda each: each[1].st_mtime):
        if size <= max_size:
            return
        size -= stat.st_size
        for name in (path.name, path.name.removesuffix("-cache") + "-atime"):
            path.with_name(name).unlink(missing_ok=True)


def keep_programs_quickly() -> None:
    """Keeping a program reads no other file of the cache, and compresses it less.

    Before it writes a program, JAX looks at every other one, a tenth of a second among 3,000, while
    the other workers wait. `bound_cache` does that once a run.
    """
    lru_cache.LRUCache._evict_if_needed = lambda self, additional_size=0: None
    compress = functools.partial(zlib.compress, level=1)
    compilation_cache.zlib = types.SimpleNamespace(compress=compress, decompress=zlib.decompress)
