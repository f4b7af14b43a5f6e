"""The encoder of an encoder-decoder."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from spec_jax.models.attention_mask import AttentionMask
from spec_jax.models.blocks import Block
from spec_jax.models.config import TransformerConfig
from spec_jax.models.context import LayerContext, score_options
from spec_jax.models.layers import Linear, norm_of, positions_of, relative_bias_of
from spec_jax.sharding import Placement


class Encoder(nnx.Module):
    """Reads all of a source at once: tokens, or frames of a spectrum of audio.

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
        self.positions = positions_of(config, dtype, rngs)
        self.relative = relative_bias_of(config, False, dtype, rngs)
        self.blocks = nnx.List(
            [Block(config, layer, dtype=dtype, rngs=rngs) for layer in config.layers]
        )
        self.final_norm = norm_of(config, dtype)

    def embed_frames(
        self, frames: Float[Array, "batch frames bins"]
    ) -> Float[Array, "batch half embed"]:
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
        placement: Placement = Placement.single_device(),
    ) -> Float[Array, "batch source embed"]:
        """The encoder's output; positions at or past a row's length mean nothing.

        Args:
          x: the embedded source.
          lengths: positions of each row, at least one.
          backend: how attention and norms are computed, see `attention`.
          placement: how the model lies on devices.
        """
        mask = AttentionMask.bidirectional(lengths, x.shape[1])
        bias = None if self.relative is None else self.relative()
        context = LayerContext(mask, None, score_options(self.config), bias, placement, backend)
        if self.positions is not None:
            x = x + self.positions(mask.positions)
        x = context.residual(x)
        for block in self.blocks:
            x, _ = block(x, None, context)
        return self.final_norm(x, backend)
