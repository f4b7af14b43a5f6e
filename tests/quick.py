"""Programs of tests run once or twice: tiny ones are compiled in half the time, and run slower."""

from spec_jax.models.compiling import CompilerOptions
from spec_jax.models.model import Model

OPTIMIZED = Model.compiler_options
"""The options of users' programs."""


def compiler_options(model: Model) -> CompilerOptions:
    """The options of tests' programs: real weights are decoded long enough to be optimized for."""
    options = OPTIMIZED.__get__(model)
    tiny = model.config.embed_size < 256
    return {**options, "xla_backend_optimization_level": "0"} if tiny else options
