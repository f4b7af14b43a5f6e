"""What may be chosen, and where files are kept."""

import os
from pathlib import Path

DTYPES = ("float32", "bfloat16")
AUTO = "auto"
LLM_DTYPES = (AUTO, *DTYPES)
CHECKPOINT_FORMATS = ("orbax", "safetensors")
"""What a model can be converted to."""
QUANTIZATIONS = (AUTO, "none", "int8", "int4", "gguf")
PLAN_QUANTIZATIONS = ("none", "int8", "int4")
"""Those that a model's shape alone determines."""
KV_CACHE_DTYPES = (AUTO, "int8")
OFFLOADS = ("none", "host")


def cache_directory() -> Path:
    """Where fetched and built files are kept: $SPEC_JAX_CACHE, or spec-jax in the user's cache."""
    if own := os.environ.get("SPEC_JAX_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "spec-jax"
