"""Programs of tests run once or twice, so XLA compiles them quickly and they run slower.

On CPU this takes less than half of the processor time. Tests that read a compiled program, and
those that decode real weights for long, compile as users do.
"""

import functools
import os
from typing import Any

import jax

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
