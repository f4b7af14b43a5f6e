"""The arguments that layers share in a forward call."""

import dataclasses

import jax
from jaxtyping import Array, Float

from spec_jax.models.attention_mask import AttentionMask, ScoreOptions
from spec_jax.models.config import TransformerConfig
from spec_jax.models.layers import alibi_slopes
from spec_jax.sharding import Placement


@dataclasses.dataclass(frozen=True)
class LayerContext:
    """The arguments of layers of one kind in a forward call: positions and what tokens see."""

    mask: AttentionMask
    rotation: Float[Array, "2 batch tokens half"] | None
    scores: ScoreOptions
    bias: Float[Array, "heads distances"] | None
    placement: Placement
    backend: str | None

    def pin(self, x: Array, *axes: str | None) -> Array:
        return self.placement.pin(x, *axes)

    def heads(self, projected: Array, head_dim: int, axis: str) -> Array:
        """A projection as [batch, tokens, heads, head_dim]."""
        if self.placement.platform == "tpu":
            # XLA:TPU would merge the reshape into the product and then copy every weight, before a
            # loop, into the layout of the merged product.
            projected = jax.lax.optimization_barrier(projected)
        shape = (*projected.shape[:2], -1, head_dim)
        return self.pin(projected.reshape(shape), "batch", None, axis, None)

    def residual(self, x: Array) -> Array:
        """The residual stream, replicated; otherwise the partitioner adds reductions to norms."""
        return self.pin(x, "batch", None, "embed")


def score_options(config: TransformerConfig) -> ScoreOptions:
    """How the layers of a model turn products of queries and keys into scores."""
    return ScoreOptions(
        query_scalar=float(config.query_pre_attn_scalar or config.head_dim),
        cap=config.score_cap,
        slopes=alibi_slopes(config.num_heads, config.alibi_scale),
    )
