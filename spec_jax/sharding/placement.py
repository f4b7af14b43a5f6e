"""How one model lies on a mesh of devices."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

HOST_MEMORY = "pinned_host"
"""JAX's name of the host memory that devices read by themselves."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """How one model lies on devices: what `Layout.place` returns, or `single_device`.

    Attributes:
      mesh: the devices; None for a single one, which is the one that holds a program's arguments.
        Programs for it name no device and hold no sharding.
      axes: logical axis -> the mesh axes it is sharded over; others are replicated.
      streamed_from: the first of the model's blocks whose matrices lie in host memory, each
        device's part in the memory of that device's host; None if all lie on the devices.
      all_reduce_dtype: in which devices add their products with weights in bfloat16.
    """

    mesh: Mesh | None
    axes: tuple[tuple[str, tuple[str, ...]], ...]
    streamed_from: int | None = None
    all_reduce_dtype: str = "float32"

    @classmethod
    def single_device(cls) -> "Placement":
        """The whole model on one device, whichever holds its weights."""
        return cls(mesh=None, axes=())

    def spec(self, *logical: str | None) -> PartitionSpec:
        """The partition of an array with these logical axes; None is a dimension of no name."""
        sharded = dict(self.axes)
        return PartitionSpec(*(sharded.get(name or "") or None for name in logical))

    def sharding(self, *logical: str | None) -> NamedSharding | None:
        """The sharding of an array with these logical axes; None on a single device."""
        return self.mesh and NamedSharding(self.mesh, self.spec(*logical))

    def put(self, array: np.ndarray | jax.Array, *logical: str | None) -> jax.Array:
        """An array on the devices, of one that every process holds in full."""
        sharding = self.sharding(*logical)
        if sharding is None:
            return jnp.asarray(array)
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    @property
    def platform(self) -> str:
        """`cpu`, `gpu` or `tpu`: what the devices are, which need not be here to compile for."""
        return self.mesh.devices.flat[0].platform if self.mesh else jax.default_backend()

    @property
    def skips_unused(self) -> bool:
        """Whether a program skips the sampling steps that no row needs.

        Each device must hold every row's parameters, or the answer would be an exchange. On GPUs a
        condition takes longer than the steps: 11 % of a round with top-k
        (benchmarks/log/2026-gpu.md).
        """
        return self.num_shards("batch") == 1 and self.platform != "gpu"

    def pin(self, x: jax.Array, *logical: str | None) -> jax.Array:
        """Holds an array inside a compiled program to the sharding of its logical axes."""
        sharding = self.sharding(*logical)
        return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)

    def mesh_axes(self, logical: str) -> tuple[str, ...]:
        """The mesh axes over which a logical axis is sharded."""
        return dict(self.axes).get(logical, ())

    def all_reduce_dtype_of(self, dtype: DTypeLike, *inputs: str) -> jnp.dtype:
        """The dtype in which devices add what each makes of its part of a layer's inputs.

        Args:
          dtype: of the layer's weights; those in float32 keep their precision.
          inputs: the logical axes of the inputs.
        """
        is_sum = any(self.num_shards(axis) > 1 for axis in inputs)
        rounds = is_sum and jnp.dtype(dtype) == jnp.bfloat16
        return jnp.dtype(self.all_reduce_dtype if rounds else jnp.float32)

    def num_shards(self, logical: str) -> int:
        """The number of shards of a logical axis; 1 if it is replicated."""
        axes = self.mesh_axes(logical)
        return math.prod(self.mesh.shape[axis] for axis in axes) if self.mesh else 1
