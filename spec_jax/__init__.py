"""spec-jax: lossless speculative decoding in JAX."""

from spec_jax.config import SamplingParams, SpeculativeConfig
from spec_jax.errors import (
    CheckpointError,
    ConfigError,
    RequestError,
    SpecJaxError,
    VocabularyMismatchError,
)
from spec_jax.llm import LLM
from spec_jax.outputs import RequestOutput, SpeculativeMetrics, StreamChunk, Usage

__all__ = [
    "LLM",
    "CheckpointError",
    "ConfigError",
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

__version__ = "0.1.0"
