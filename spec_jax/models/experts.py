"""Sparse MLPs: a router chooses a few experts for each token (arXiv 1701.06538, 2401.04088)."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from spec_jax.kernels import PackedWeight, Tiles, Weight, expert_products, part_specs, products
from spec_jax.models.config import TransformerConfig
from spec_jax.models.context import LayerContext
from spec_jax.models.layers import ACTIVATIONS, Linear

Names = tuple[str, ...]


class ExpertLinear(nnx.Module):
    """A matrix of each expert, [experts, in, out]."""

    def __init__(
        self, sizes: tuple[int, int, int], axes: Names, *, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        weight = jax.random.normal(rngs.params(), sizes) / math.sqrt(sizes[1])
        self.weight = nnx.Param(weight.astype(dtype), axes=axes)


class SparseMlp(nnx.Module):
    """An MLP that multiplies a token with its experts' matrices and reads no others.

    Every token gets all the experts that it chooses: none has a capacity. A token's result depends
    on no other token, up to rounding. On a mesh each device computes what its experts, and its
    part of their hidden width, add to the tokens, and one exchange sums it.
    """

    def __init__(self, config: TransformerConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        experts = config.experts
        assert experts is not None
        self.experts, self.activation = experts, config.activation
        embed, size = config.embed_size, experts.size
        self.router = Linear(
            embed, experts.count, axes=("embed", "choices"), bias=False, dtype=dtype, rngs=rngs
        )
        inward, outward = (experts.count, embed, size), (experts.count, size, embed)

        def linear(sizes: tuple[int, int, int], axes: Names) -> ExpertLinear:
            return ExpertLinear(sizes, axes, dtype=dtype, rngs=rngs)

        self.expert_gate = linear(inward, ("experts", "embed", "mlp"))
        self.expert_up = linear(inward, ("experts", "embed", "mlp"))
        self.expert_down = linear(outward, ("experts", "mlp", "embed"))

    def __call__(
        self,
        x: Float[Array, "batch tokens embed"],
        context: LayerContext,
        residual: Float[Array, "batch tokens embed"] | None = None,
    ) -> Float[Array, "batch tokens embed"]:
        out = self._output(x, context)
        return out if residual is None else residual + out

    def _output(
        self, x: Float[Array, "batch tokens embed"], context: LayerContext
    ) -> Float[Array, "batch tokens embed"]:
        placement, num_tokens = context.placement, context.mask.num_tokens
        layers = (self.router, self.expert_gate, self.expert_up, self.expert_down)
        weights = tuple(layer.weight.get_value() for layer in layers)
        skip = placement.platform != "gpu"
        if placement.mesh is None:
            return self._apply(x, *weights, skip=skip, num_tokens=num_tokens)
        cut = {name: placement.mesh_axes(name) for name in ("experts", "mlp", "embed")}
        # Rows that lie beside experts on one mesh axis are gathered for them.
        rows = tuple(
            axis
            for axis in placement.mesh_axes("batch")
            if axis not in (*cut["experts"], *cut["mlp"])
        )
        stream = PartitionSpec(rows or None, None, cut["embed"] or None)
        sums = placement.all_reduce_dtype_of(weights[-1].dtype, "experts", "mlp")
        local = functools.partial(self._apply, skip=skip, sums=sums, **cut)
        specs = (
            part_specs(weight, placement.spec(*layer.weight.get_metadata()["axes"]))
            for layer, weight in zip(layers, weights, strict=True)
        )
        return jax.shard_map(
            local,
            mesh=placement.mesh,
            in_specs=(stream, *specs),
            out_specs=stream,
            check_vma=False,
        )(x, *weights)

    def _apply(
        self,
        x: Float[Array, "batch tokens embed"],
        router: Weight,
        gate: Weight,
        up: Weight,
        down: Weight,
        *,
        skip: bool,
        num_tokens: Int[Array, " batch"] | None = None,
        sums: DTypeLike = jnp.float32,
        experts: Names = (),
        mlp: Names = (),
        embed: Names = (),
    ) -> Float[Array, "batch tokens embed"]:
        """The part of the output from one device's matrices; names are mesh axes that shard them.

        `sums` is the dtype in which devices add their parts.
        """
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        logits = _summed(products(x, [router])[0], embed)
        weights, chosen = jax.lax.top_k(jax.nn.softmax(logits), self.experts.per_token)
        if self.experts.normed:
            weights = weights / weights.sum(-1, keepdims=True)
        tokens, each = chosen.shape
        rows, chosen = jnp.repeat(x, each, axis=0), chosen.ravel()
        activate = ACTIVATIONS[self.activation]

        if isinstance(gate, PackedWeight):
            if num_tokens is not None:
                order = jnp.arange(shape[1], dtype=jnp.int32)[None, :, None]
                is_real = jnp.broadcast_to(order < num_tokens[:, None, None], (*shape[:2], each))
                chosen = jnp.where(is_real.ravel(), chosen, -1)
            multiply = functools.partial(expert_products, chosen=chosen)
        else:
            here = jax.tree.leaves(gate)[0].shape[0]
            if experts:
                chosen = chosen - here * jax.lax.axis_index(experts)
            tiles = Tiles.of(chosen, here=here, count=self.experts.count, tokens=tokens)
            multiply = functools.partial(tiles.products, skip=skip)
        inward = [_summed(part, embed) for part in multiply(rows, stacks=[gate, up])]
        (out,) = multiply(activate(inward[0]) * inward[1], stacks=[down])
        out = (out.reshape(tokens, each, -1) * weights[..., None]).sum(1)
        return _summed(out.astype(sums), (*experts, *mlp)).astype(jnp.float32).reshape(shape)


def _summed(x: Array, axes: Names) -> Array:
    return jax.lax.psum(x, axes) if axes else x
