"""What a user may choose: frozen, validated, with a suggestion for every misspelt key."""

from typing import Any

from spec_jax.config.arguments import check_choice, check_integer, check_path
from spec_jax.config.choices import (
    AUTO,
    CHECKPOINT_FORMATS,
    DTYPES,
    KV_CACHE_DTYPES,
    LLM_DTYPES,
    OFFLOADS,
    PLAN_METHODS,
    PLAN_QUANTIZATIONS,
    QUANTIZATIONS,
    Activations,
    CheckpointFormat,
    Dtype,
    KvCacheDtype,
    LlmDtype,
    Offload,
    PlanMethod,
    PlanQuantization,
    Quantization,
    cache_directory,
)
from spec_jax.config.fields import (
    AtLeast0,
    AtLeast1,
    Flag,
    Many,
    NotNegative,
    Positive,
    Share,
    Table,
    Text,
    annotations_of,
    choices_of,
    config_class,
    option_names,
    to_tuple,
)
from spec_jax.config.loading import LoadingOptions
from spec_jax.config.other_names import no_attribute
from spec_jax.config.sampling import FIT_CONTEXT, MAX_LOGPROBS, SamplingParams
from spec_jax.config.speculative import (
    CONFIDENCE_THRESHOLD,
    COPIES,
    CUSTOM,
    DRAFT_LENGTH_POLICIES,
    DRAFTING_METHODS,
    METHODS,
    SCORINGS,
    VERIFICATIONS,
    CustomConfig,
    DraftModelConfig,
    EarlyExitConfig,
    NoDraftConfig,
    PromptLookupConfig,
    RecycleConfig,
    SpeculativeConfig,
    SuffixConfig,
    UniversalTextConfig,
    UniversalVocabularyConfig,
    add_method,
    all_options,
)
from spec_jax.config.structured import StructuredOutputsParams

__all__ = [
    "CustomConfig",
    "DraftModelConfig",
    "EarlyExitConfig",
    "LoadingOptions",
    "NoDraftConfig",
    "PromptLookupConfig",
    "RecycleConfig",
    "SamplingParams",
    "SpeculativeConfig",
    "StructuredOutputsParams",
    "SuffixConfig",
    "UniversalTextConfig",
    "UniversalVocabularyConfig",
    "config_class",
]
"""For users; the other names are for the rooms of the package."""


def __getattr__(name: str) -> Any:
    raise no_attribute(__name__, name)  # scripts for vLLM import names from here
