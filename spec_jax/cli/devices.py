"""Which devices JAX looks for."""

import contextlib
import importlib.metadata
import importlib.util
import os
import pkgutil
from pathlib import Path
from typing import Any

import jax

from spec_jax.sharding import Layout

PCI = Path("/sys/bus/pci/devices")
GOOGLE = "0x1ae0"
OTHER_CLASSES = ("0x01", "0x02")
"""PCI classes of storage and network, which Google's virtual machines have of Google, too."""


def ignore_absent_tpu() -> None:
    """Leaves JAX the CPU alone if libtpu is installed, but no TPU and no other plug-in.

    Looking for a TPU where there is none, libtpu would complain at length. Call it before JAX has
    devices. What `JAX_PLATFORMS` says is left as it is.
    """
    config: Any = jax.config
    chosen = config.jax_platforms or "JAX_FORCE_TPU_INIT" in os.environ
    if not chosen and importlib.util.find_spec("libtpu") and not has_tpu() and not _plugins():
        config.update("jax_platforms", "cpu")


def prepare_to_compile_for(layout: Layout) -> None:
    """Gives JAX the devices that compiling for a layout takes: only GPUs compile for GPUs.

    Call it before JAX has devices.
    """
    if layout.platform == "gpu":
        ignore_absent_tpu()
    else:
        jax.config.update("jax_platforms", "cpu")
    if layout.platform == "cpu":
        with contextlib.suppress(RuntimeError):  # too late: JAX has its devices already
            jax.config.update("jax_num_cpu_devices", layout.size)


def has_tpu() -> bool:
    """Whether there may be a TPU on the PCI bus."""
    for device in PCI.glob("*"):
        with contextlib.suppress(OSError):
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
            if vendor == GOOGLE and not kind.startswith(OTHER_CLASSES):
                return True
    return False


def _plugins() -> bool:
    """Whether JAX has plug-ins for other accelerators, by the places where JAX looks."""
    package = importlib.util.find_spec("jax_plugins")
    places = package.submodule_search_locations if package else None
    entries = importlib.metadata.entry_points(group="jax_plugins")
    return bool(entries) or any(pkgutil.iter_modules(places or []))
