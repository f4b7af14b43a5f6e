"""Programs of tests run once or twice: tiny ones are compiled in half the time, and run slower."""

from typing import Any

from spec_jax.engine import programs
from spec_jax.models.model import Model

OPTIMIZED = programs.compiler_options
"""The options of users' programs."""


def compiler_options(target: Model) -> dict[str, Any] | None:
    """The options of tests' programs: real weights are decoded long enough to be optimized for."""
    options = OPTIMIZED(target)
    tiny = target.config.embed_size < 256
    return {**(options or {}), "xla_backend_optimization_level": 0} if tiny else options
