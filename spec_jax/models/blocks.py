"""Mixer, MLP and their norms: a layer of the stack."""

from typing import Any

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from spec_jax.kernels import native_calls
from spec_jax.models.cache import KVState
from spec_jax.models.config import LayerConfig, TransformerConfig
from spec_jax.models.context import LayerContext
from spec_jax.models.experts import SparseMlp
from spec_jax.models.layers import ACTIVATIONS, Linear, Norm, norm_of, project
from spec_jax.models.mixers import MIXERS
from spec_jax.models.self_attention import Attention


class Mlp(nnx.Module):
    """A two- or, when gated, three-matrix MLP, whose output is added to a `residual`."""

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
        self,
        x: Float[Array, "batch tokens embed"],
        context: LayerContext,
        residual: Float[Array, "batch tokens embed"] | None = None,
    ) -> Float[Array, "batch tokens embed"]:
        # The partition of the hidden width follows from the weights' partition.
        activate, num_tokens = ACTIVATIONS[self.activation], context.mask.num_tokens
        if self.gate is None:
            (up,) = project(x, (self.up,), num_tokens=num_tokens)
            hidden = activate(up)
        else:
            gate, up = project(x, (self.gate, self.up), num_tokens=num_tokens)
            if context.backend == "native" and self.activation in native_calls.GATES:
                rows = gate.reshape(-1, gate.shape[-1]), up.reshape(-1, up.shape[-1])
                hidden = native_calls.gated(*rows, self.activation, num_tokens).reshape(gate.shape)
            else:
                hidden = activate(gate) * up
        return self.down(hidden, context.placement, num_tokens, residual)


class Block(nnx.Module):
    """Norm, attention, norm, MLP; in sequence, or both reading the block's input.

    A decoder's block with an encoder attends to the encoder's output between the two. The caller
    decides what a layer sees, so that all blocks of one kind are alike. The mixer of any kind is
    named `attention`.
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

        def norm(exists: bool) -> Norm | None:
            return norm_of(config, dtype) if exists else None

        self.attention_norm = norm(config.pre_norms)
        self.attention = MIXERS[layer.kind](config, layer, dtype=dtype, rngs=rngs)
        self.attention_post_norm = norm(config.post_norms)
        has_source = config.encoder is not None
        self.cross_norm = norm(has_source)
        self.cross = Attention(config, layer, dtype=dtype, rngs=rngs) if has_source else None
        self.mlp_norm = norm(config.pre_norms and not config.shared_norm)
        self.mlp = (SparseMlp if layer.mlp == "experts" else Mlp)(config, dtype=dtype, rngs=rngs)
        self.mlp_post_norm = norm(config.post_norms)

    def __call__(
        self,
        x: Float[Array, "batch tokens embed"],
        cache: Any,
        context: LayerContext,
        source: tuple[KVState, LayerContext] | None = None,
    ) -> tuple[Float[Array, "batch tokens embed"], Any]:
        shared = context.backend, context.mask.num_tokens

        def added(norm: Norm | None, out: Array) -> Array:
            return (out if norm is None else norm(out, *shared)) * self.residual_scale

        normed = x if self.attention_norm is None else self.attention_norm(x, *shared)
        attended, cache = self.attention(normed, cache, context)
        attended = added(self.attention_post_norm, attended)
        if self.cross is not None and self.cross_norm is not None and source is not None:
            normed_input = self.cross_norm(x + attended, *shared)
            attended = attended + self.cross.cross_attend(normed_input, *source)
        if self.parallel_residual or self.mlp_norm is None:
            stream = x + attended
            mlp_input = x if self.parallel_residual else stream
            if self.shared_norm:
                mlp_input = normed
            elif self.mlp_norm is not None:
                mlp_input = self.mlp_norm(mlp_input, *shared)
        else:
            stream, mlp_input = self.mlp_norm.of_sum(x, attended, *shared)
        if context.backend == "native" and self.mlp_post_norm is None and self.residual_scale == 1:
            return self.mlp(mlp_input, context, stream), cache
        out = context.residual(self.mlp(mlp_input, context))
        return stream + added(self.mlp_post_norm, out), cache
