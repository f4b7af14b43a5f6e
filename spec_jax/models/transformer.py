"""One composable stack of layers. Flax NNX holds its weights; the forward is a pure function."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from spec_jax.kernels import products
from spec_jax.models.attention_mask import AttentionMask
from spec_jax.models.blocks import Block
from spec_jax.models.cache import CrossAttentionCache, KVCache
from spec_jax.models.config import LayerConfig, TransformerConfig
from spec_jax.models.context import LayerContext, score_options
from spec_jax.models.encoder import Encoder
from spec_jax.models.layers import (
    Embedding,
    Linear,
    norm_of,
    positions_of,
    project,
    relative_bias_of,
    rope_frequencies,
)
from spec_jax.models.mixers import check_trees
from spec_jax.models.rotary import LongRopeScaling, RotaryConfig, YarnScaling
from spec_jax.models.streaming import is_streamed, run_streamed
from spec_jax.sharding import Placement

MAX_LOOKED_UP = 16
"""Most tokens of a row whose embeddings are looked up place by place where some are padding. XLA
looks up several places in threads, which wait for native code's."""


class Transformer(nnx.Module):
    """A language model, perhaps with an encoder; its cache and positions live outside of it."""

    def __init__(self, config: TransformerConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embedding(config.vocab_size, config.embed_size, dtype=dtype, rngs=rngs)
        self.embedding_norm = norm_of(config, dtype) if config.embedding_norm else None
        self.encoder = (
            None if config.encoder is None else Encoder(config.encoder, dtype=dtype, rngs=rngs)
        )
        self.positions = positions_of(config, dtype, rngs)
        self.relative = relative_bias_of(config, True, dtype, rngs)
        self.blocks = nnx.List(
            [Block(config, layer, dtype=dtype, rngs=rngs) for layer in config.layers]
        )
        self.final_norm = norm_of(config, dtype)
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

    def embed_tokens(
        self,
        tokens: Int[Array, "batch tokens"],
        backend: str | None = None,
        num_tokens: Int[Array, " batch"] | None = None,
    ) -> Float[Array, "batch tokens embed"]:
        """The residual stream of tokens before the first block; of padding it may be anything.

        Args:
          tokens: token ids.
          backend: how norms are computed.
          num_tokens: how many tokens of each row are real; None for all.
        """
        if num_tokens is None or not 1 < tokens.shape[1] <= MAX_LOOKED_UP:
            x = self.embed(tokens)
        else:
            x = self._embed_real(tokens, num_tokens.max())
        x = x * self.config.embedding_scale
        return x if self.embedding_norm is None else self.embedding_norm(x, backend)

    def _embed_real(
        self, tokens: Int[Array, "batch tokens"], count: Int[Array, ""]
    ) -> Float[Array, "batch tokens embed"]:
        """The embeddings of the first tokens, place by place."""

        def look_up(at: Array, x: Array) -> Array:
            new = self.embed(jax.lax.dynamic_slice_in_dim(tokens, at, 1, axis=1))
            return jax.lax.dynamic_update_slice_in_dim(x, new, at, axis=1)

        zeros = jnp.zeros((*tokens.shape, self.config.embed_size), jnp.float32)
        return jax.lax.fori_loop(0, count, look_up, zeros)

    def encode(
        self,
        source: Int[Array, "batch source"] | Float[Array, "batch frames bins"],
        lengths: Int[Array, " batch"],
        *,
        backend: str | None = None,
        placement: Placement = Placement.single_device(),
    ) -> Float[Array, "batch positions embed"]:
        """The encoder's output for tokens or frames; see `Encoder` for the arguments."""
        assert self.encoder is not None
        x = self.encoder.embed_frames(source) if source.ndim == 3 else self.embed(source)
        return self.encoder(x, lengths, backend=backend, placement=placement)

    def cross_attention_kv(
        self,
        hidden: Float[Array, "batch positions embed"],
        lengths: Int[Array, " batch"],
        *,
        placement: Placement = Placement.single_device(),
    ) -> CrossAttentionCache:
        """The keys and values of an encoder's output in each layer."""
        mask = AttentionMask.bidirectional(lengths, hidden.shape[1])
        context = LayerContext(mask, None, score_options(self.config), None, placement, None)
        layers = [
            block.cross.cross_attention_kv(hidden, context) for block in self.blocks if block.cross
        ]
        return CrossAttentionCache(tuple(layers), lengths)

    def run(
        self,
        x: Float[Array, "batch tokens embed"],
        cache: KVCache,
        mask: AttentionMask,
        *,
        first: int = 0,
        last: int | None = None,
        feature_layers: Sequence[int] = (),
        backend: str | None = None,
        placement: Placement = Placement.single_device(),
    ) -> tuple[
        Float[Array, "batch tokens embed"], Float[Array, "batch tokens taps embed"] | None, KVCache
    ]:
        """Runs the residual stream of new tokens through blocks `first` to `last` (static).

        Args:
          x: the output of the block before.
          cache: the states of everything before the tokens; the caller leaves slots for them.
          mask: the tokens' positions and what they see.
          first: the first block.
          last: the block to stop before; the last one by default.
          feature_layers: which features to return, see `TargetOutput` (static).
          backend: how attention and norms are computed, see `attention`.
          placement: how the model lies on devices.

        Returns:
          The output of the last of these blocks, the features, and the cache with the tokens
          written but `lengths` unmoved: the loop's commit decides how many count.
        """
        config = self.config
        if mask.tree_mask is not None:
            check_trees(config)
        scores = score_options(config)
        bias = None if self.relative is None else self.relative()
        rotations = {
            rotary: _rotation(rotary, config, mask.positions)
            for rotary in dict.fromkeys(layer.rotary for layer in config.kinds)
        }

        def context_of(layer: LayerConfig) -> LayerContext:
            windowed = dataclasses.replace(scores, window=layer.window)
            return LayerContext(mask, rotations[layer.rotary], windowed, bias, placement, backend)

        contexts = {layer: context_of(layer) for layer in config.kinds}
        if first == 0 and self.positions is not None:
            x = x + self.positions(mask.positions)
        x = contexts[config.layers[0]].residual(x)
        layers, encoded, across = list(cache.layers), cache.encoded, None
        if encoded is not None:
            seen = AttentionMask(mask.positions, encoded.lengths, encoded.lengths, causal=False)
            across = LayerContext(seen, None, scores, None, placement, backend)

        def run_kind(graphdef, kind, weights, x, layer, remembered):
            source = (remembered, across) if remembered and across else None
            return nnx.merge(graphdef, weights)(x, layer, contexts[kind], source)

        # Blocks of a kind are traced and lowered once: most of a start would be tracing otherwise.
        # XLA inlines the calls, so that the compiled program is the same.
        run_kind = jax.jit(run_kind, static_argnums=(0, 1))

        def run(at: int, graphdef: Any, weights: Any, x: Array, layer: Any):
            i, remembered = first + at, encoded and encoded.layers[first + at]
            return run_kind(graphdef, config.layers[i], weights, x, layer, remembered)

        some = slice(first, last)
        blocks = self.blocks[some]
        if is_streamed(blocks):
            # An opaque `True`. Where it is false no output of a block matters.
            true = jnp.isfinite(self.final_norm.weight[0])
            stream, layers[some] = run_streamed(blocks, x, layers[some], run, true)
        else:
            stream = [x]
            for at, block in enumerate(blocks):
                x, layers[first + at] = run(at, *nnx.split(block), x, layers[first + at])
                stream.append(x)
        cache = dataclasses.replace(cache, layers=tuple(layers))
        if not feature_layers:
            return stream[-1], None, cache
        unknown = [i for i in feature_layers if not first <= i < first + len(stream)]
        if unknown:
            raise ValueError(
                f"features {unknown} are not in layers {first} to {first + len(stream) - 1}"
            )
        return stream[-1], jnp.stack([stream[i - first] for i in feature_layers], axis=2), cache

    def logits(
        self,
        hidden: Float[Array, "*lead embed"],
        num_tokens: Int[Array, " batch"] | None = None,
    ) -> Float[Array, "*lead vocab"]:
        """Float32 logits of final hidden states; for `num_tokens` see `kernels.products`."""
        if self.head is not None:
            (logits,) = project(hidden, [self.head], num_tokens=num_tokens)
        else:
            weight = self.embed.weight.get_value()
            logits = products(hidden, [weight], num_tokens=num_tokens)[0]
        logits = logits * self.config.logit_scale
        cap = self.config.logit_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def _rotation(
    rotary: RotaryConfig | None, config: TransformerConfig, positions: Int[Array, "batch tokens"]
) -> Float[Array, "2 batch tokens half"] | None:
    """Cosines and sines by which layers of a kind rotate heads at these positions."""
    if rotary is None or rotary.size(config.head_dim) == 0:
        return None
    amplitude = 1.0
    if isinstance(rotary.scaling, YarnScaling | LongRopeScaling):
        amplitude = rotary.scaling.amplitude
    frequencies = rope_frequencies(rotary, config.head_dim, config.max_position)
    angles = positions[..., None].astype(jnp.float32) * frequencies[None, None]
    # Without the barrier XLA computes them again for each head of each layer.
    return jax.lax.optimization_barrier(amplitude * jnp.stack([jnp.cos(angles), jnp.sin(angles)]))
