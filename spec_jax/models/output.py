"""The result of a call of a model."""

from typing import NamedTuple

from jaxtyping import Array, Float

from spec_jax.models.cache import KVCache


class TargetOutput(NamedTuple):
    """The result of a call over new tokens.

    Feature i is the residual stream after the first i layers: 0 is the embedding, and `num_layers`
    is the input of the final norm. These are Hugging Face's `hidden_states[i]`, except that its
    last entry is normalised.

    Attributes:
      logits: float32, or None if the call computes none.
      features: of the layers that the caller named, in that order; None if it named none.
      cache: the cache with the new tokens, which its lengths do not count yet.
    """

    logits: Float[Array, "batch scored vocab"] | None
    features: Float[Array, "batch scored taps embed"] | None
    cache: KVCache
