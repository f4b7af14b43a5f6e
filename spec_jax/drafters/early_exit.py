"""Self-speculation: the target's first layers draft, with its output head.

LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710, section 4.3), including its cache of keys, values
and hidden states at the exit: scoring continues from the layer where drafting stopped.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array

from spec_jax.drafters.autoregressive import autoregress
from spec_jax.drafters.base import Context, Draft, Drafter, PartialForward
from spec_jax.errors import ConfigError
from spec_jax.models.cache import KVCache
from spec_jax.models.config import TransformerConfig
from spec_jax.models.model import Model
from spec_jax.pytree import pytree, static


def exit_layers(layers: int | None, config: TransformerConfig, name: str) -> int:
    """The first layers of a target that draft: as many as asked for, or a quarter.

    Raises:
      ConfigError: the target does not have more.
    """
    layers = layers or max(1, config.num_layers // 4)
    if layers >= config.num_layers:
        raise ConfigError(
            f"early_exit_layers is {layers}, but {name} has {config.num_layers} layers; give fewer."
        )
    return layers


@pytree
class EarlyExit(Drafter):
    """Drafts with the target's first layers, on the target's cache: it has no state.

    Attributes:
      model: the target.
      lookahead: tokens proposed per round (K).
      layers: how many of its layers draft.
    """

    model: Model
    lookahead: int = static()
    layers: int = static()
    fixed_length = True
    has_confidence = True

    def propose(self, state: None, context: Context) -> tuple[Draft, None]:
        """K tokens, and the hidden states of all of them after the first layers."""
        cache = context.cache
        assert cache is not None
        last_token = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)
        batch, width = len(context.lengths), self.model.config.embed_size
        hidden = jnp.zeros((batch, self.lookahead + 1, width), jnp.float32)

        def read(carry: tuple[KVCache, Array], i: int | Array, token: Array):
            cache, hidden = carry
            x, after = self.model.run_first_layers(
                token, cache.with_lengths(start + i), self.layers
            )
            return (after, jax.lax.dynamic_update_slice_in_dim(hidden, x, i, axis=1)), x

        def step(carry: tuple[KVCache, Array], i: int | Array, last: Array):
            carry, x = read(carry, i, last_token if isinstance(i, int) else last)
            return self.model.logits(x), carry

        start = cache.lengths
        draft, carry = autoregress(
            step,
            (cache, hidden),
            context,
            lookahead=self.lookahead,
            placement=self.model.placement,
        )
        # The last draft token is not computed yet, except in rows that stopped earlier.
        steps = jnp.int32(self.lookahead) if context.fixed_length else draft.lengths.max()
        in_order = jnp.concatenate([last_token, draft.tokens], axis=1)
        token = jax.lax.dynamic_slice_in_dim(in_order, steps, 1, axis=1)
        (cache, hidden), _ = read(carry, steps, token)
        partial = PartialForward(hidden, cache.with_lengths(start), self.layers)
        return dataclasses.replace(draft, partial=partial), None
