"""spec-jax: lossless speculative decoding in JAX."""

import importlib
import sys
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spec_jax.async_llm import AsyncLLM, RequestStream, follow
    from spec_jax.config import SamplingParams, SpeculativeConfig, StructuredOutputsParams
    from spec_jax.engine.custom import DrafterFactory, DrafterSetting, register_drafter
    from spec_jax.errors import (
        CheckpointError,
        ConfigError,
        ContextLengthError,
        DisagreementError,
        GenerationError,
        QueueFullError,
        RequestError,
        ShutdownError,
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

__version__ = "0.2.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "ContextLengthError",
    "DisagreementError",
    "DrafterFactory",
    "DrafterSetting",
    "GenerationError",
    "Layout",
    "Logprob",
    "QueueFullError",
    "RequestError",
    "RequestOutput",
    "RequestStream",
    "SamplingParams",
    "ShutdownError",
    "SpecJaxError",
    "SpeculativeConfig",
    "SpeculativeMetrics",
    "StreamChunk",
    "StructuredOutputsParams",
    "Usage",
    "VocabularyMismatchError",
    "follow",
    "register_drafter",
]


def __dir__() -> list[str]:
    """The public names, too, before they are first used."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used: JAX takes seconds, a usage error must not."""
    for module in ("config", "errors", "outputs", "sharding", "engine.custom", "llm", "async_llm"):
        if name in __all__ and hasattr(
            imported := importlib.import_module(f"spec_jax.{module}"), name
        ):
            return getattr(imported, name)
    raise importlib.import_module("spec_jax.config.other_names").no_attribute(__name__, name)


class _OtherModules(MetaPathFinder):
    """Says where names are that one would import from a module of vLLM or transformers."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        package, _, module = fullname.partition(".")
        if package != __name__:
            return
        other_names = importlib.import_module("spec_jax.config.other_names")
        if module in other_names.NOT_MODULES:
            raise ModuleNotFoundError(
                f"spec_jax has no module {module}; all public names come from spec_jax itself, "
                "as in: from spec_jax import SamplingParams.",
                name=fullname,
            )


sys.meta_path.append(_OtherModules())  # asked last
