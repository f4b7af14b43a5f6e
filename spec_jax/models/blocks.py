"""Attention, MLP and their norms: a layer of the stack."""

import dataclasses
from collections.abc import Sequence

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from spec_jax.models.attention import Pattern, Scores, attend, attention, remember
from spec_jax.models.cache import LayerCache
from spec_jax.models.config import LayerConfig, TransformerConfig
from spec_jax.models.experts import SparseMlp
from spec_jax.models.layers import ACTIVATIONS, Linear, Norm, alibi_slopes, project, rotate
from spec_jax.sharding import Placement


@dataclasses.dataclass(frozen=True)
class Call:
    """What layers of one kind share in a forward call: positions and what the tokens see."""

    pattern: Pattern
    rotation: Float[Array, "2 batch tokens half"] | None
    scores: Scores
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


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions over a cache."""

    def __init__(self, config: TransformerConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
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

    def __call__(
        self, x: Float[Array, "batch tokens embed"], cache: LayerCache | None, call: Call
    ) -> tuple[Float[Array, "batch tokens embed"], LayerCache]:
        projected = project(x, (self.query, self.key, self.value))
        norms = self.query_norm, self.key_norm, None
        if self.normed == "projection":
            projected = _normed(norms, projected)
        axes = ("heads", "kv_heads", "kv_heads")
        heads = [
            call.heads(each, self.head_dim, axis)
            for each, axis in zip(projected, axes, strict=True)
        ]
        q, k, v = _normed(norms, heads) if self.normed == "head" else heads
        if call.rotation is not None:
            q, k = rotate(q, call.rotation), rotate(k, call.rotation)
        out, cache = attention(
            q,
            k,
            v,
            cache,
            call.pattern,
            call.scores,
            call.bias,
            backend=call.backend,
            placement=call.placement,
        )
        return call.residual(self.output(out.reshape(*x.shape[:2], -1), call.placement)), cache

    def remember(self, hidden: Float[Array, "batch source embed"], call: Call) -> LayerCache:
        """The keys and values of an encoder's output."""
        keys, values = (
            call.heads(each, self.head_dim, "kv_heads")
            for each in project(hidden, (self.key, self.value))
        )
        return remember(keys, values, None, placement=call.placement)

    def look(
        self, x: Float[Array, "batch tokens embed"], source: LayerCache, call: Call
    ) -> Float[Array, "batch tokens embed"]:
        """Attention to what `remember` made."""
        queries = call.heads(self.query(x), self.head_dim, "heads")
        out = attend(
            queries,
            source,
            call.pattern,
            call.scores,
            backend=call.backend,
            placement=call.placement,
        )
        return call.residual(self.output(out.reshape(*x.shape[:2], -1), call.placement))


def _normed(norms: Sequence[Norm | None], each: Sequence[Array]) -> list[Array]:
    return [x if norm is None else norm(x) for norm, x in zip(norms, each, strict=True)]


class Mlp(nnx.Module):
    """A two- or, when gated, three-matrix MLP."""

    def __init__(self, config: TransformerConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.activation = config.activation

        def linear(in_size: int, out_size: int, axes: tuple[str, str]) -> Linear:
            bias = config.mlp_bias
            return Linear(in_size, out_size, axes=axes, bias=bias, dtype=dtype, rngs=rngs)

        embed_size, mlp_size = config.embed_size, config.mlp_size
        gated = config.gated_mlp
        self.gate = linear(embed_size, mlp_size, ("embed", "mlp")) if gated else None
        self.up = linear(embed_size, mlp_size, ("embed", "mlp"))
        self.down = linear(mlp_size, embed_size, ("mlp", "embed"))

    def __call__(
        self, x: Float[Array, "batch tokens embed"], placement: Placement
    ) -> Float[Array, "batch tokens embed"]:
        # Its partition follows from that of its weights.
        activate = ACTIVATIONS[self.activation]
        if self.gate is None:
            return self.down(activate(self.up(x)), placement)
        gate, up = project(x, (self.gate, self.up))
        return self.down(activate(gate) * up, placement)


class Block(nnx.Module):
    """Norm, attention, norm, MLP; in sequence, or both reading the block's input.

    A decoder's block with an encoder attends to the encoder's output between the two. The caller
    decides what a layer sees, so that all blocks of a model are alike but for their MLPs.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer: LayerConfig,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.parallel_residual = config.parallel_residual
        self.shared_norm, self.residual_scale = config.shared_norm, config.residual_scale

        def norm(wanted: bool) -> Norm | None:
            if not wanted:
                return None
            return Norm(config.embed_size, kind=config.norm, eps=config.norm_eps, dtype=dtype)

        self.attention_norm = norm(config.pre_norms)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.attention_post_norm = norm(config.post_norms)
        has_source = config.encoder is not None
        self.cross_norm = norm(has_source)
        self.cross = Attention(config, dtype=dtype, rngs=rngs) if has_source else None
        self.mlp_norm = norm(config.pre_norms and not config.shared_norm)
        self.mlp = (SparseMlp if layer.mlp == "experts" else Mlp)(config, dtype=dtype, rngs=rngs)
        self.mlp_post_norm = norm(config.post_norms)

    def __call__(
        self,
        x: Float[Array, "batch tokens embed"],
        cache: LayerCache | None,
        call: Call,
        source: tuple[LayerCache, Call] | None = None,
    ) -> tuple[Float[Array, "batch tokens embed"], LayerCache]:
        def added(norm: Norm | None, out: Array) -> Array:
            return (out if norm is None else norm(out)) * self.residual_scale

        normed = x if self.attention_norm is None else self.attention_norm(x)
        attended, cache = self.attention(normed, cache, call)
        attended = added(self.attention_post_norm, attended)
        if self.cross is not None and self.cross_norm is not None and source is not None:
            attended = attended + self.cross.look(self.cross_norm(x + attended), *source)
        mlp_input = x if self.parallel_residual else x + attended
        if self.shared_norm:
            mlp_input = normed
        elif self.mlp_norm is not None:
            mlp_input = self.mlp_norm(mlp_input)
        out = call.residual(self.mlp(mlp_input, call.placement))
        return x + attended + added(self.mlp_post_norm, out), cache


def scores_of(config: TransformerConfig) -> Scores:
    """What a model's layers do to the products of queries and keys."""
    return Scores(
        query_scalar=float(config.query_pre_attn_scalar or config.head_dim),
        cap=config.score_cap,
        slopes=alibi_slopes(config.num_heads, config.alibi_scale),
    )
