"""What may be chosen, and where files are kept."""

import os
from pathlib import Path
from typing import Final, Literal, get_args

AUTO: Final = "auto"
Dtype = Literal["float32", "bfloat16"]
LlmDtype = Literal["auto", "float32", "bfloat16"]
CheckpointFormat = Literal["orbax", "safetensors"]
"""What a model can be converted to."""
Quantization = Literal["auto", "none", "int8", "int4", "gguf"]
PlanQuantization = Literal["none", "int8", "int4", "gguf"]
"""The quantizations of which a plan can be made: all but the automatic choice."""
PlanMethod = Literal["draft_model", "early_exit", "prompt_lookup", "none"]
"""The methods whose programs the models' shapes alone determine."""
Activations = Literal["auto", "float32", "int8"]
"""What products with quantized weights round their inputs to."""
KvCacheDtype = Literal["auto", "int8"]
Offload = Literal["none", "host"]

DTYPES, LLM_DTYPES = get_args(Dtype), get_args(LlmDtype)
CHECKPOINT_FORMATS = get_args(CheckpointFormat)
QUANTIZATIONS, PLAN_QUANTIZATIONS = get_args(Quantization), get_args(PlanQuantization)
PLAN_METHODS = get_args(PlanMethod)
KV_CACHE_DTYPES, OFFLOADS = get_args(KvCacheDtype), get_args(Offload)


def cache_directory() -> Path:
    """Where fetched and built files are kept: $SPEC_JAX_CACHE, or spec-jax in the user's cache."""
    if directory := os.environ.get("SPEC_JAX_CACHE"):
        return Path(directory).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "spec-jax"
