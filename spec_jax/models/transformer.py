"""One composable stack of layers. Flax NNX holds its weights; the forward is a pure function."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from spec_jax.kernels import products
from spec_jax.models.attention import Pattern, Scores, attend, attention, remember
from spec_jax.models.cache import Encoded, KVCache, LayerCache
from spec_jax.models.config import LongRopeScaling, TransformerConfig, YarnScaling
from spec_jax.models.experts import SparseMlp
from spec_jax.models.layers import (
    ACTIVATIONS,
    Embedding,
    Linear,
    Norm,
    Positions,
    RelativeBias,
    alibi_slopes,
    project,
    rope_frequencies,
    rotate,
)
from spec_jax.models.streaming import run_blocks
from spec_jax.sharding import Placement, platform_of


@dataclasses.dataclass(frozen=True)
class _Call:
    """What layers of one kind share in a forward call: positions and what the tokens see."""

    pattern: Pattern
    rotation: Float[Array, "2 batch tokens half"] | None
    scores: Scores
    bias: Float[Array, "heads distances"] | None
    placement: Placement | None
    backend: str | None

    def pin(self, x: Array, *axes: str | None) -> Array:
        return x if self.placement is None else self.placement.pin(x, *axes)

    def heads(self, projected: Array, head_dim: int, axis: str) -> Array:
        """A projection as [batch, tokens, heads, head_dim]."""
        if platform_of(self.placement) == "tpu":
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
        self, x: Float[Array, "batch tokens embed"], cache: LayerCache | None, call: _Call
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
        return call.residual(self.output(out.reshape(*x.shape[:2], -1))), cache

    def remember(self, hidden: Float[Array, "batch source embed"], call: _Call) -> LayerCache:
        """The keys and values of an encoder's output."""
        keys, values = (
            call.heads(each, self.head_dim, "kv_heads")
            for each in project(hidden, (self.key, self.value))
        )
        return remember(keys, values, None, placement=call.placement)

    def look(
        self, x: Float[Array, "batch tokens embed"], source: LayerCache, call: _Call
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
        return call.residual(self.output(out.reshape(*x.shape[:2], -1)))


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
        self, x: Float[Array, "batch tokens embed"], placement: Placement | None
    ) -> Float[Array, "batch tokens embed"]:
        # Its partition follows from that of its weights.
        activate = ACTIVATIONS[self.activation]
        if self.gate is None:
            return self.down(activate(self.up(x)))
        gate, up = project(x, (self.gate, self.up))
        return self.down(activate(gate) * up)


class Block(nnx.Module):
    """Norm, attention, norm, MLP; in sequence, or both reading the block's input.

    A decoder's block with an encoder attends to the encoder's output between the two. The caller
    decides what a layer sees, so that all blocks of a model are alike but for their MLPs.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        is_sparse: bool = False,
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
        self.mlp = (SparseMlp if is_sparse else Mlp)(config, dtype=dtype, rngs=rngs)
        self.mlp_post_norm = norm(config.post_norms)

    def __call__(
        self,
        x: Float[Array, "batch tokens embed"],
        cache: LayerCache | None,
        call: _Call,
        source: tuple[LayerCache, _Call] | None = None,
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


class Encoder(nnx.Module):
    """Reads a whole source at once: tokens, or frames of a sound's spectrum.

    Every position sees every other. Two convolutions over time, the second of stride two, read
    frames (Whisper, arXiv 2212.04356, section 2.2). They are products with three frames in a row.
    """

    def __init__(self, config: TransformerConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config

        def convolution(in_size: int) -> Linear | None:
            if not config.mel_bins:
                return None
            axes, size = ("frames", "embed"), config.embed_size
            return Linear(3 * in_size, size, axes=axes, bias=True, dtype=dtype, rngs=rngs)

        self.first, self.second = convolution(config.mel_bins), convolution(config.embed_size)
        self.positions = _positions(config, dtype, rngs)
        self.relative = _relative(config, False, dtype, rngs)
        self.blocks = nnx.List(
            [Block(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)]
        )
        self.final_norm = Norm(
            config.embed_size, kind=config.norm, eps=config.norm_eps, dtype=dtype
        )

    def read(self, frames: Float[Array, "batch frames bins"]) -> Float[Array, "batch half embed"]:
        """Half as many positions as frames."""
        x = frames
        for layer, stride in ((self.first, 1), (self.second, 2)):
            assert layer is not None
            padded = jnp.pad(x, ((0, 0), (1, 1), (0, 0)))
            ends = [padded[:, k : k + x.shape[1] : stride] for k in range(3)]
            # Inputs are sorted by bin, then by time, as convolutions are stored.
            x = jnp.stack(ends, axis=-1).reshape(x.shape[0], -1, 3 * x.shape[2])
            x = jax.nn.gelu(layer(x), approximate=False)
        return x

    def __call__(
        self,
        x: Float[Array, "batch source embed"],
        lengths: Int[Array, " batch"],
        *,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> Float[Array, "batch source embed"]:
        """The encoder's output; positions at or past a row's length mean nothing.

        Args:
          x: the embedded source.
          lengths: positions of each row, at least one.
          backend: how attention is computed, see `attention`.
          placement: how the model lies on a mesh, if it does.
        """
        pattern = Pattern.whole(lengths, x.shape[1])
        bias = None if self.relative is None else self.relative()
        call = _Call(pattern, None, _scores(self.config), bias, placement, backend)
        if self.positions is not None:
            x = x + self.positions(pattern.positions)
        x = call.residual(x)
        for block in self.blocks:
            x, _ = block(x, None, call)
        return self.final_norm(x)


def _scores(config: TransformerConfig) -> Scores:
    return Scores(
        query_scalar=float(config.query_pre_attn_scalar or config.head_dim),
        cap=config.score_cap,
        slopes=alibi_slopes(config.num_heads, config.alibi_scale),
    )


def _positions(config: TransformerConfig, dtype: DTypeLike, rngs: nnx.Rngs) -> Positions | None:
    if not config.learned_positions:
        return None
    return Positions(config.max_position, config.embed_size, dtype=dtype, rngs=rngs)


def _relative(
    config: TransformerConfig, causal: bool, dtype: DTypeLike, rngs: nnx.Rngs
) -> RelativeBias | None:
    if not config.relative_buckets:
        return None
    return RelativeBias(
        config.relative_buckets,
        config.relative_distance,
        config.num_heads,
        causal=causal,
        dtype=dtype,
        rngs=rngs,
    )


class Transformer(nnx.Module):
    """A language model, perhaps with an encoder; its cache and positions live outside of it."""

    def __init__(self, config: TransformerConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embedding(config.vocab_size, config.embed_size, dtype=dtype, rngs=rngs)
        self.embedding_norm = (
            Norm(config.embed_size, kind=config.norm, eps=config.norm_eps, dtype=dtype)
            if config.embedding_norm
            else None
        )
        self.encoder = (
            None if config.encoder is None else Encoder(config.encoder, dtype=dtype, rngs=rngs)
        )
        self.positions = _positions(config, dtype, rngs)
        self.relative = _relative(config, True, dtype, rngs)
        self.blocks = nnx.List(
            [
                Block(config, dtype=dtype, rngs=rngs, is_sparse=config.is_sparse(i))
                for i in range(config.num_layers)
            ]
        )
        self.final_norm = Norm(
            config.embed_size, kind=config.norm, eps=config.norm_eps, dtype=dtype
        )
        self.head = (
            None
            if config.tied_head
            else Linear(
                config.embed_size,
                config.vocab_size,
                axes=("embed", "vocab"),
                bias=config.head_bias,
                dtype=dtype,
                rngs=rngs,
            )
        )

    def read(self, tokens: Int[Array, "batch tokens"]) -> Float[Array, "batch tokens embed"]:
        """The residual stream of tokens before the first block."""
        x = self.embed(tokens) * self.config.embedding_scale
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def encode(
        self,
        source: Int[Array, "batch source"] | Float[Array, "batch frames bins"],
        lengths: Int[Array, " batch"],
        *,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> Float[Array, "batch positions embed"]:
        """The encoder's output of tokens or frames; arguments as of `Encoder`."""
        assert self.encoder is not None
        x = self.encoder.read(source) if source.ndim == 3 else self.embed(source)
        return self.encoder(x, lengths, backend=backend, placement=placement)

    def remember(
        self,
        hidden: Float[Array, "batch positions embed"],
        lengths: Int[Array, " batch"],
        *,
        placement: Placement | None = None,
    ) -> Encoded:
        """What the layers see of an encoder's output."""
        pattern = Pattern.whole(lengths, hidden.shape[1])
        call = _Call(pattern, None, _scores(self.config), None, placement, None)
        layers = [block.cross.remember(hidden, call) for block in self.blocks if block.cross]
        return Encoded(tuple(layers), lengths)

    def run(
        self,
        x: Float[Array, "batch tokens embed"],
        cache: KVCache,
        pattern: Pattern,
        *,
        first: int = 0,
        last: int | None = None,
        backend: str | None = None,
        placement: Placement | None = None,
    ) -> tuple[Float[Array, "batch tokens embed"], KVCache]:
        """Runs the residual stream of new tokens through blocks `first` to `last` (static).

        Args:
          x: what the block before gave out.
          cache: keys and values of everything before the tokens; the caller leaves room for them.
          pattern: where the tokens stand and what they see.
          first: the first block.
          last: the block to stop before; the last one by default.
          backend: how attention is computed, see `attention`.
          placement: how the model lies on a mesh, if it does.

        Returns:
          What the last of these blocks gave out, and the cache with the tokens written but
          `lengths` unmoved: the loop's commit decides how many count.
        """
        config = self.config
        scores = _scores(config)
        rotation = _rotation(config, pattern.positions)
        bias = None if self.relative is None else self.relative()
        call = _Call(pattern, rotation, scores, bias, placement, backend)
        local = dataclasses.replace(
            call,
            rotation=_rotation(config, pattern.positions, local=True),
            scores=dataclasses.replace(scores, window=config.sliding_window),
        )
        if first == 0 and self.positions is not None:
            x = x + self.positions(pattern.positions)
        x = call.residual(x)
        layers, encoded, across = list(cache.layers), cache.encoded, None
        if encoded is not None:
            seen = Pattern(pattern.positions, encoded.lengths, encoded.lengths, causal=False)
            across = _Call(seen, None, scores, None, placement, backend)

        def run(at: int, block: Block, x: Array, layer: LayerCache) -> tuple[Array, LayerCache]:
            i = first + at
            own = local if config.is_local(i) else call
            if not config.is_rotated(i):
                own = dataclasses.replace(own, rotation=None)
            source = (encoded.layers[i], across) if encoded and across else None
            return block(x, layer, own, source)

        some = slice(first, last)
        # Where it is false nothing that a block gives out matters.
        true = jnp.isfinite(self.final_norm.weight[0])
        x, layers[some] = run_blocks(self.blocks[some], x, layers[some], run, true)
        return x, dataclasses.replace(cache, layers=tuple(layers))

    def logits(self, hidden: Float[Array, "*lead embed"]) -> Float[Array, "*lead vocab"]:
        """Float32 logits of final hidden states."""
        if self.head is not None:
            found = self.head(hidden)
        else:
            found = products(hidden, [self.embed.weight.get_value()])[0]
        found = found * self.config.logit_scale
        cap = self.config.logit_cap
        return found if cap is None else cap * jnp.tanh(found / cap)


def _rotation(
    config: TransformerConfig, positions: Int[Array, "batch tokens"], *, local: bool = False
) -> Float[Array, "2 batch tokens half"] | None:
    """Cosines and sines by which layers of a kind rotate heads at these positions."""
    if config.rotary_size == 0:
        return None
    amplitude, factor, scaling, theta = (
        1.0,
        config.rope_factor,
        config.rope_scaling,
        config.rope_theta,
    )
    if local and config.local_rope_theta is not None:
        factor, scaling, theta = 1.0, None, config.local_rope_theta
    if isinstance(scaling, YarnScaling | LongRopeScaling):
        amplitude = scaling.amplitude
    frequencies = rope_frequencies(config.rotary_size, theta, factor, scaling, config.max_position)
    angles = positions[..., None].astype(jnp.float32) * frequencies[None, None]
    # Otherwise XLA computes them anew for each head of each layer.
    return jax.lax.optimization_barrier(amplitude * jnp.stack([jnp.cos(angles), jnp.sin(angles)]))
