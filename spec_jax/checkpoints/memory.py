"""Checks, before weights are read or made, that they fit into the devices' memory."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np
import psutil

from spec_jax import distributed
from spec_jax.checkpoints.packing import Packing
from spec_jax.errors import ConfigError
from spec_jax.sharding import HOST_MEMORY

GIB = 2**30
_MIN_BITS = {"int8": 8, "int4": 4, "gguf": 2}
"""Bits that a quantized weight takes at least, without scales."""


def free_memory(devices: Collection[Any]) -> int:
    """Free bytes of the device that has the fewest, over all processes.

    Args:
      devices: JAX's, of this process.
    """
    stats = [device.memory_stats() for device in devices]
    if all(stats):
        here = min(each["bytes_limit"] - each["bytes_in_use"] for each in stats)
    else:  # the devices are this machine's cores
        here = psutil.virtual_memory().available // len(devices)
    return min(distributed.gather(here))


def check_weights_fit(
    name: str, leaves: Mapping[str, jax.ShapeDtypeStruct], packing: Packing
) -> None:
    """Refuses a model whose weights take more than is free, rather than fill memory with it.

    Args:
      name: the model's, for the message.
      leaves: shape, dtype and sharding of each weight as a plain array.
      packing: the form of matrices in memory.

    Raises:
      ConfigError: they do not fit, on whichever process.
    """
    devices: Collection[Any] = jax.local_devices()[:1]
    needed = 0
    for key, leaf in leaves.items():
        shape, sharding = leaf.shape, leaf.sharding
        if sharding is not None:
            if sharding.memory_kind == HOST_MEMORY:
                continue
            devices = sharding.addressable_devices
            shape = sharding.shard_shape(shape)
        quantization = packing.of(key, leaf.shape).quantization
        bits = _MIN_BITS.get(quantization, 8 * np.dtype(leaf.dtype).itemsize)
        needed += math.prod(shape) * bits // 8
    free = free_memory(devices)
    if needed > free:
        raise ConfigError(
            f"the weights of {name} take {needed / GIB:.1f} GiB or more on each device, but "
            f"{free / GIB:.1f} GiB are free; use fewer bits (quantization int4), or a layout of "
            "more devices. `spec-jax plan` says what a model needs."
        )
