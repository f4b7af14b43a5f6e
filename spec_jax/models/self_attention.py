"""Attention as a layer: projections, norms and rotation around `attention`."""

from collections.abc import Sequence
from typing import ClassVar

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from spec_jax.models.attention import attend, attention, write_kv
from spec_jax.models.cache import KVState, StateSize
from spec_jax.models.config import LayerConfig, TransformerConfig
from spec_jax.models.context import LayerContext
from spec_jax.models.layers import Linear, Norm, project


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions over a cache."""

    reads_trees: ClassVar[bool] = True

    def __init__(
        self,
        config: TransformerConfig,
        layer: LayerConfig,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.head_dim = head_dim = config.head_dim
        width, kv_width = config.num_heads * head_dim, config.num_kv_heads * head_dim

        def linear(in_size: int, out_size: int, axes: tuple[str, str], bias: bool) -> Linear:
            return Linear(in_size, out_size, axes=axes, bias=bias, dtype=dtype, rngs=rngs)

        self.query = linear(config.embed_size, width, ("embed", "heads"), config.qkv_bias)
        key_bias = config.qkv_bias and config.key_bias
        self.key = linear(config.embed_size, kv_width, ("embed", "kv_heads"), key_bias)
        self.value = linear(config.embed_size, kv_width, ("embed", "kv_heads"), config.qkv_bias)
        self.output = linear(width, config.embed_size, ("heads", "embed"), config.output_bias)

        def norm(heads: int) -> Norm | None:
            if config.qk_norm == "none":
                return None
            size = head_dim if config.qk_norm == "head" else heads * head_dim
            return Norm(size, kind="rms", eps=config.norm_eps, dtype=dtype)

        self.normed = config.qk_norm
        self.query_norm, self.key_norm = norm(config.num_heads), norm(config.num_kv_heads)

    @staticmethod
    def new_state(config: TransformerConfig, layer: LayerConfig, size: StateSize) -> KVState:
        """Empty keys and values."""
        return KVState.zeros(config, layer, size)

    def __call__(
        self, x: Float[Array, "batch tokens embed"], state: KVState | None, context: LayerContext
    ) -> tuple[Float[Array, "batch tokens embed"], KVState]:
        num_tokens = context.mask.num_tokens
        projected = project(x, (self.query, self.key, self.value), num_tokens=num_tokens)
        norms = self.query_norm, self.key_norm, None
        if self.normed == "projection":
            projected = _normed(norms, projected, context.backend)
        axes = ("heads", "kv_heads", "kv_heads")
        heads = [
            context.heads(each, self.head_dim, axis)
            for each, axis in zip(projected, axes, strict=True)
        ]
        q, k, v = _normed(norms, heads, context.backend) if self.normed == "head" else heads
        out, state = attention(
            q,
            k,
            v,
            state,
            context.mask,
            context.scores,
            context.bias,
            rotation=context.rotation,
            backend=context.backend,
            placement=context.placement,
        )
        out = out.reshape(*x.shape[:2], -1)
        return context.residual(self.output(out, context.placement, num_tokens)), state

    def cross_attention_kv(
        self, hidden: Float[Array, "batch source embed"], context: LayerContext
    ) -> KVState:
        """The keys and values of an encoder's output."""
        keys, values = (
            context.heads(each, self.head_dim, "kv_heads")
            for each in project(hidden, (self.key, self.value))
        )
        return write_kv(keys, values, None, placement=context.placement)

    def cross_attend(
        self, x: Float[Array, "batch tokens embed"], source: KVState, context: LayerContext
    ) -> Float[Array, "batch tokens embed"]:
        """Attention to the keys and values of `cross_attention_kv`."""
        queries = context.heads(self.query(x), self.head_dim, "heads")
        out = attend(
            queries,
            source,
            context.mask,
            context.scores,
            backend=context.backend,
            placement=context.placement,
        )
        return context.residual(self.output(out.reshape(*x.shape[:2], -1), context.placement))


def _normed(
    norms: Sequence[Norm | None], each: Sequence[Array], backend: str | None
) -> list[Array]:
    return [x if norm is None else norm(x, backend) for norm, x in zip(norms, each, strict=True)]
