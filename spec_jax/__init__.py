"""spec-jax: lossless speculative decoding in JAX."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spec_jax.config import SamplingParams, SpeculativeConfig
    from spec_jax.errors import (
        CheckpointError,
        ConfigError,
        DisagreementError,
        GenerationError,
        RequestError,
        SpecJaxError,
        VocabularyMismatchError,
    )
    from spec_jax.llm import LLM
    from spec_jax.outputs import (
        CompletionOutput,
        Logprob,
        RequestOutput,
        SpeculativeMetrics,
        StreamChunk,
        Usage,
    )
    from spec_jax.sharding import Layout

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "DisagreementError",
    "GenerationError",
    "Layout",
    "Logprob",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SpecJaxError",
    "SpeculativeConfig",
    "SpeculativeMetrics",
    "StreamChunk",
    "Usage",
    "VocabularyMismatchError",
]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used: JAX takes seconds, a usage error must not."""
    for module in ("config", "errors", "outputs", "sharding", "llm"):
        if name in __all__ and hasattr(
            found := importlib.import_module(f"spec_jax.{module}"), name
        ):
            return getattr(found, name)
    raise AttributeError(f"module 'spec_jax' has no attribute {name!r}")
