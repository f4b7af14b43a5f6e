"""Targets in host memory: what a user asks for, checked, as layouts and placements."""

import dataclasses
import os

import jax

from spec_jax.errors import ConfigError
from spec_jax.models.config import TransformerConfig
from spec_jax.sharding import Layout, Placement


def layout_to_offload(layout: Layout | None) -> Layout:
    """The layout of an offloaded target, by default of one device.

    Call it before anything uses JAX's devices.

    Raises:
      ConfigError: there is no layout and no accelerator.
    """
    # XLA pins 64 GB of host memory at most for a GPU, unless it is told otherwise.
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(memory // 2**30))
    if layout is None and jax.default_backend() == "cpu":
        raise ConfigError(
            "offload is 'host', but JAX computes on the CPU, whose memory is the host's; leave "
            "offload out. With a layout of emulated devices it can be tried."
        )
    return layout or Layout.tensor_parallel(1)


def offloaded(
    placement: Placement, config: TransformerConfig, offload: str, resident_layers: int
) -> Placement:
    """The placement of a target, with its blocks from `resident_layers` on in host memory.

    Args:
      placement: of the whole model on devices.
      config: the model's shape.
      offload: `host`, or `none` for all blocks on the devices.
      resident_layers: how many of the blocks, the first ones, stay on the devices.

    Raises:
      ConfigError: the model has fewer layers, or nothing is offloaded.
    """
    if resident_layers and offload != "host":
        raise ConfigError(
            f"resident_layers is {resident_layers}, but offload is {offload!r}, which keeps all "
            "layers on the devices; use offload 'host', or leave resident_layers out."
        )
    if not 0 <= resident_layers <= config.num_layers:
        raise ConfigError(
            f"resident_layers is {resident_layers}, but the target has {config.num_layers} layers; "
            "give a number from 0 to that."
        )
    if offload != "host":
        return placement
    return dataclasses.replace(placement, streamed_from=resident_layers)
