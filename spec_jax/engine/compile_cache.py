"""Compiled programs outlive the process: the next one reads them instead of compiling."""

import hashlib
import platform
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from spec_jax.engine.checked_cache import check_entries

MAX_BYTES = 2 * 2**30
"""Limit of the kept programs in bytes; the programs used last stay."""
_MIN_SECONDS = 0.1
"""Programs that compile faster are not kept."""


def keep_programs(folder: Path) -> None:
    """Keeps compiled programs in a folder, unless JAX already has a cache folder.

    Programs for a CPU use its instruction set, so each kind of CPU has a folder inside it. If the
    folder cannot be made, nothing is kept.

    Args:
      folder: of all programs; made when needed.
    """
    find_anywhere(jax.default_backend())
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    machine_folder = folder / machine_name()
    try:
        machine_folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    check_entries(str(machine_folder), MAX_BYTES)
    jax.config.update("jax_compilation_cache_dir", str(machine_folder))
    jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_SECONDS)
    compilation_cache.reset_cache()  # JAX looks for a folder once, at the first compilation


def find_anywhere(platform: str) -> None:
    """Makes the keys of the cache independent of its folder.

    JAX keeps the measurements of the GPU compiler beside the programs, and adds the name of their
    folder to every key, on other platforms too.
    """
    if platform != "gpu":
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


def machine_name() -> str:
    """A name of this machine's kind of CPU, made from its features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor(), platform.node()]
    features = sorted({line for line in lines if line.lower().startswith(("flags", "features"))})
    description = "\n".join([platform.machine(), *(features or lines)])
    return hashlib.sha256(description.encode()).hexdigest()[:12]
