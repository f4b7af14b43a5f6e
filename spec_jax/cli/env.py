"""`spec-jax env`: versions and devices, for bug reports."""

import contextlib
import importlib.metadata
import json
import os
import platform
import sys
from typing import Any

from spec_jax import __version__
from spec_jax.cli.screen import Screen
from spec_jax.cli.tool_options import EnvOptions

PACKAGES = (
    *("jax", "jaxlib", "flax", "numpy", "ml-dtypes", "transformers", "tokenizers", "safetensors"),
    *("gguf", "llguidance", "huggingface-hub", "libtpu"),
    *("jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin"),
)
VARIABLES = ("JAX_", "XLA_", "CUDA_", "NVIDIA_VISIBLE", "TPU_", "LIBTPU_", "ROCR_", "SPEC_JAX_")
"""Prefixes of the variables that change how a run behaves; none of them holds a secret."""


def run(options: EnvOptions, screen: Screen) -> int:
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
            value = ", ".join(value) if isinstance(value, list) else value
            print(f"  {name}: {value}")
    return 0


def _report() -> dict[str, Any]:
    packages = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    variables = sorted(each for each in os.environ.items() if each[0].startswith(VARIABLES))
    return {
        "spec-jax": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "executable": sys.executable,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": packages,
        "jax": _jax(),
        "environment": dict(variables),
    }


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
    statistics: dict[str, int] | None = None
    with contextlib.suppress(Exception):  # not every platform reports it
        statistics = device.memory_stats()
    limit = (statistics or {}).get("bytes_limit")
    memory = f", {limit / 2**30:.1f} GiB" if limit else ""
    return f"{device} ({device.device_kind}{memory})"
