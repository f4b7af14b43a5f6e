"""`spec-jax env`: versions and devices, for bug reports."""

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable
from typing import Any

from spec_jax import __version__
from spec_jax.cli.tool_options import EnvOptions

PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "numpy",
    "ml-dtypes",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "llguidance",
    "huggingface-hub",
    "libtpu",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "jax-rocm7-plugin",
)
VARIABLES = ("JAX_", "XLA_", "CUDA_", "NVIDIA_VISIBLE", "TPU_", "LIBTPU_", "ROCR_", "SPEC_JAX_")
"""Prefixes of the variables that change how a run behaves; none of them holds a secret."""


def run(options: EnvOptions) -> int:
    """Prints the report; returns the exit code."""
    report = _report()
    if options.json:
        print(json.dumps(report, indent=2))
        return 0
    for title, values in report.items():
        if not isinstance(values, dict):
            print(f"{title}: {values}")
            continue
        print(f"{title}:")
        for name, value in values.items():
            print(f"  {name}: {', '.join(value) if isinstance(value, list) else value}")
    return 0


def _report() -> dict[str, Any]:
    return {
        "spec-jax": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "executable": sys.executable,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "jax": _jax(),
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)
        },
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _jax() -> dict[str, Any]:
    """What JAX sees. Errors are reported too: a bug report matters most if JAX does not start."""
    try:
        import jax

        from spec_jax.cli.devices import ignore_absent_tpu
        from spec_jax.kernels import native

        ignore_absent_tpu()

        return {
            "backend": jax.default_backend(),
            "processes": jax.process_count(),
            "devices": [_device(device) for device in jax.devices()],
            "native CPU products": native.description(),
        }
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _device(device: Any) -> str:
    memory: Callable[[], dict[str, int] | None] = device.memory_stats
    try:
        limit = (memory() or {}).get("bytes_limit")
    except Exception:  # not every platform reports it
        limit = None
    room = f", {limit / 2**30:.1f} GiB" if limit else ""
    return f"{device} ({device.device_kind}{room})"
