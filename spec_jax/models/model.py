"""A model as the loop sees it: weights, and the calls that decoding makes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from spec_jax.models.attention_mask import AttentionMask
from spec_jax.models.cache import CrossAttentionCache, KVCache, StateSize
from spec_jax.models.construction import ModelWeights
from spec_jax.models.mixers import new_cache
from spec_jax.models.output import TargetOutput
from spec_jax.models.source import EncoderInput
from spec_jax.models.transformer import Transformer
from spec_jax.pytree import pytree, static


@pytree
class Model(ModelWeights):
    """Weights and their forward passes over explicit caches.

    Attributes:
      attention: how attention is computed, a name of `attention.BACKENDS`; the fastest by default.
        Training uses `dense`, since only that has a gradient.
      rounds_cache: whether keys and values are in 8 bits.
    """

    attention: str | None = static(default=None)
    rounds_cache: bool = static(default=False)

    def new_cache(self, batch: int, capacity: int, headroom: int | None = None) -> KVCache:
        """An empty cache of the model's shape and dtype; see `StateSize` for the arguments."""
        dtype = jnp.int8 if self.rounds_cache else self._wide_dtype
        return new_cache(self.config, StateSize(batch, capacity, dtype, headroom, self.placement))

    def encode(
        self, source: EncoderInput, *, shared: bool = False
    ) -> tuple[CrossAttentionCache, EncoderInput]:
        """The keys and values of a source in each layer, for a cache's `encoded`.

        Args:
          source: the encoder's input.
          shared: use the output of the target's encoder, which the source holds.

        Returns:
          The keys and values, and the source with the encoder's output.
        """
        module, hidden = self.module, source.hidden if shared else None
        lengths = jnp.asarray(source.lengths)
        if hidden is None:
            hidden = module.encode(
                jnp.asarray(source.values), lengths, backend=self._backend, placement=self.placement
            )
        encoded = module.cross_attention_kv(hidden, lengths, placement=self.placement)
        layers = jax.tree.map(lambda each: each.astype(self._wide_dtype), encoded.layers)
        encoded = dataclasses.replace(encoded, layers=layers)
        return encoded, dataclasses.replace(source, hidden=hidden)

    def prefill(
        self,
        tokens: Int[Array, "batch tokens"],
        cache: KVCache,
        num_tokens: Int[Array, " batch"] | None = None,
        feature_layers: Sequence[int] = (),
    ) -> TargetOutput:
        """Writes the tokens' keys and values, without logits; see `score` for the arguments."""
        module = self.module
        _, features, cache = self._run(
            module,
            self._embed(tokens, num_tokens),
            cache,
            num_tokens=num_tokens,
            feature_layers=tuple(feature_layers),
        )
        return TargetOutput(None, features, cache)

    def _embed(
        self, tokens: Int[Array, "batch tokens"], num_tokens: Int[Array, " batch"] | None
    ) -> Float[Array, "batch tokens embed"]:
        return self.module.embed_tokens(
            tokens, self._backend, num_tokens if self.skips_padding else None
        )

    @property
    def _wide_dtype(self) -> DTypeLike:
        """The dtype of arrays that the loop updates."""
        # XLA:CPU updates a bfloat16 array through a float32 copy of the whole array.
        return jnp.float32 if self.platform == "cpu" else self.dtype

    def new_states(self, batch: int, capacity: int) -> Float[Array, "batch capacity embed"]:
        """A buffer for the hidden states of the last layer at each token."""
        states = jnp.zeros((batch, capacity, self.config.embed_size), self._wide_dtype)
        return self.placement.pin(states, "batch", None, "embed")

    def score(
        self,
        tokens: Int[Array, "batch tokens"],
        cache: KVCache,
        mask: AttentionMask | None = None,
        at: Sequence[int] | None = None,
        num_tokens: Int[Array, " batch"] | None = None,
        feature_layers: Sequence[int] = (),
    ) -> TargetOutput:
        """Float32 logits after the new tokens, and the cache with them.

        Args:
          tokens: token ids.
          cache: the states of everything before the tokens.
          mask: the tokens' positions and what they see; by default they continue the texts.
          at: the tokens whose logits and features are returned (static); all by default.
          num_tokens: how many tokens of each row are real, without a `mask`; padding after them
            is not written, and if `skips_padding` hardly computed. All by default.
          feature_layers: which features to return, see `TargetOutput` (static).
        """
        module = self.module
        x, features, cache = self._run(
            module,
            self._embed(tokens, num_tokens),
            cache,
            mask,
            num_tokens,
            feature_layers=tuple(feature_layers),
        )
        if at is not None:
            x, num_tokens = x[:, np.array(at)], None
            features = None if features is None else features[:, np.array(at)]
        return TargetOutput(self.logits(x, num_tokens), features, cache)

    def run_first_layers(
        self, tokens: Int[Array, "batch tokens"], cache: KVCache, layers: int
    ) -> tuple[Float[Array, "batch tokens embed"], KVCache]:
        """Runs new tokens through the first `layers` (static) blocks, and writes their caches."""
        module = self.module
        x, _, cache = self._run(
            module, module.embed_tokens(tokens, self._backend), cache, last=layers
        )
        return x, cache

    @property
    def skips_padding(self) -> bool:
        """Whether native code computes the layers and the head, and nothing of padding."""
        return self.is_packed

    def logits(
        self,
        x: Float[Array, "batch tokens embed"],
        num_tokens: Int[Array, " batch"] | None = None,
    ) -> Float[Array, "batch tokens vocab"]:
        """Float32 logits of the hidden states of any layer, through the model's own head.

        If the model `skips_padding`, the logits of tokens from `num_tokens` on may be anything.
        """
        module = self.module
        num_tokens = num_tokens if self.skips_padding else None
        normed = module.final_norm(self._not_alone(x), self._backend, num_tokens)
        logits = module.logits(normed, num_tokens)
        return self.placement.pin(logits, "batch", None, "vocab")[:, : x.shape[1]]

    def run_remaining_layers(
        self,
        x: Float[Array, "batch tokens embed"],
        cache: KVCache,
        layers: int,
        feature_layers: Sequence[int] = (),
    ) -> TargetOutput:
        """Logits of tokens after `run_first_layers`; writes the caches of the remaining layers.

        `cache.lengths` are the tokens' positions, unchanged since `run_first_layers`.
        """
        x, features, cache = self._run(
            self.module, x, cache, first=layers, feature_layers=tuple(feature_layers)
        )
        return TargetOutput(self.logits(x), features, cache)

    @property
    def _backend(self) -> str | None:
        return self.attention or ("native" if self.is_packed else None)

    @property
    def module(self) -> Transformer:
        return nnx.merge(self.graphdef, self.params)

    def _run(
        self,
        module: Transformer,
        x: Array,
        cache: KVCache,
        mask: AttentionMask | None = None,
        num_tokens: Array | None = None,
        **layers: Any,
    ) -> tuple[Array, Array | None, KVCache]:
        count = x.shape[1]
        if mask is None:
            x = self._not_alone(x)
            if num_tokens is None and x.shape[1] > count:
                num_tokens = jnp.full((x.shape[0],), count, jnp.int32)
            mask = AttentionMask.following(cache, x.shape[1], num_tokens)
        out, features, cache = module.run(
            x, cache, mask, backend=self._backend, placement=self.placement, **layers
        )
        if self.skips_padding and mask.num_tokens is not None:  # layers leave any numbers there
            is_real = jnp.arange(x.shape[1], dtype=jnp.int32)[None] < mask.num_tokens[:, None]
            out = jnp.where(is_real[..., None], out, 0.0)
            if features is not None:
                features = jnp.where(is_real[..., None, None], features, 0.0)
        return out[:, :count], None if features is None else features[:, :count], cache

    def _not_alone(self, x: Array) -> Array:
        """A single bfloat16 row beside a throw-away token.

        XLA:CPU has no one-row bfloat16 product, and widens every weight to float32 for it. XLA:GPU
        multiplies two rows, with tensor cores, in two thirds of the time of one; but a second token
        may choose other sparse experts, whose matrices would be read in vain.
        """
        alone = x.shape[0] * x.shape[1] == self.placement.num_shards("batch")
        alone = alone and self.dtype == jnp.bfloat16
        slow = self.platform == "gpu" and self.config.experts is None
        if alone and (slow or (self.platform == "cpu" and not self.is_packed)):
            return jnp.pad(x, ((0, 0), (0, 1), (0, 0)))
        return x
