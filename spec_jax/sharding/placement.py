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
    """How one model lies on a mesh: what `Layout.place` makes for it.

    Attributes:
      mesh: the devices.
      axes: logical axis -> the mesh axes it is sharded over; others are replicated.
      streamed_from: the first of the model's blocks whose matrices lie in host memory, each
        device's part in that of its own host; None if all lie on the devices.
      all_reduce_dtype: in which devices add their products with weights in bfloat16.
    """

    mesh: Mesh
    axes: tuple[tuple[str, tuple[str, ...]], ...]
    streamed_from: int | None = None
    all_reduce_dtype: str = "float32"

    def spec(self, *logical: str | None) -> PartitionSpec:
        """The partition of an array with these logical axes; None is a dimension of no name."""
        sharded = dict(self.axes)
        return PartitionSpec(*(sharded.get(name or "") or None for name in logical))

    def sharding(self, *logical: str | None) -> NamedSharding:
        """The sharding of an array with these logical axes."""
        return NamedSharding(self.mesh, self.spec(*logical))

    def put(self, array: np.ndarray, *logical: str | None) -> jax.Array:
        """A device array of a host array that every process holds whole."""
        sharding = self.sharding(*logical)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    @property
    def platform(self) -> str:
        """`cpu`, `gpu` or `tpu`: what the devices are, which need not be here to compile for."""
        return self.mesh.devices.flat[0].platform

    def pin(self, x: jax.Array, *logical: str | None) -> jax.Array:
        """Holds an array inside a compiled program to the sharding of its logical axes."""
        return jax.lax.with_sharding_constraint(x, self.sharding(*logical))

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
        return math.prod(self.mesh.shape[axis] for axis in self.mesh_axes(logical))


def platform_of(placement: Placement | None) -> str:
    """What a model runs on: `cpu`, `gpu` or `tpu`."""
    return placement.platform if placement else jax.default_backend()


def skips_unused(placement: Placement | None) -> bool:
    """Whether a program skips the steps that no row needs.

    Each device must hold every row's parameters, or the answer would be an exchange. On GPUs a
    condition takes longer than the steps (benchmarks/LOG.md, 2026-11-27).
    """
    alone = placement is None or placement.num_shards("batch") == 1
    return alone and platform_of(placement) != "gpu"
