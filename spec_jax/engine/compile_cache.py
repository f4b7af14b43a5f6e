"""Compiled programs outlive the process: the next one reads them instead of compiling."""

import hashlib
import platform
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

MAX_BYTES = 2 * 2**30
"""Most bytes of programs that are kept; those used last stay."""
_LEAST_SECONDS = 0.1
"""Programs that compile faster are not kept."""


def keep_programs(folder: Path) -> None:
    """Keeps compiled programs in a folder, unless JAX has been given one of its own.

    Programs for a CPU use what that CPU can do, so each kind has a folder inside it. A folder that
    cannot be made keeps nothing.

    Args:
      folder: of all programs; made at need.
    """
    find_anywhere(jax.default_backend())
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    own = folder / _machine()
    try:
        own.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    jax.config.update("jax_compilation_cache_dir", str(own))
    jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_SECONDS)
    compilation_cache.reset_cache()  # JAX looks for a folder once, at the first compilation


def find_anywhere(platform: str) -> None:
    """Has programs found in whatever folder they lie.

    For the sake of GPUs, JAX keeps what their compiler measures beside them, and the name of that
    folder then belongs to every key, on other platforms too.
    """
    if platform != "gpu":
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


def _machine() -> str:
    """Names this machine's kind of CPU, by what it says that it can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor(), platform.node()]
    features = sorted({line for line in lines if line.lower().startswith(("flags", "features"))})
    said = "\n".join([platform.machine(), *(features or lines)])
    return hashlib.sha256(said.encode()).hexdigest()[:12]
