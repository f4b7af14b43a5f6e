"""A draft as verification sees it, its result, and the two formulas of rejection sampling."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Verification(NamedTuple):
    """The result of verification.

    Attributes:
      accepted: how many draft tokens of each row are accepted (n).
      draft_index: which of several drafts they come from.
      token: the token emitted after them, from the residual or, after a full acceptance, from p.
      valid: false where the target gave no distribution for that token (NaN or all masked).
    """

    accepted: Int[Array, " batch"]
    draft_index: Int[Array, " batch"]
    token: Int[Array, " batch"]
    valid: Bool[Array, " batch"]


class RowDraft(NamedTuple):
    """One row of a `Draft`; attributes as there."""

    tokens: Int[Array, " drafted"]
    probs: Float[Array, "drafted vocab"] | None
    is_certain: Bool[Array, " drafted"] | None
    length: Int[Array, ""]

    def q(
        self, at: Int[Array, "*places"], p: Float[Array, "positions vocab"]
    ) -> Float[Array, "*places vocab"]:
        """The distributions that the tokens in these places were drawn from, like `p`."""
        certain = jax.nn.one_hot(self.tokens[at], p.shape[1], dtype=p.dtype)
        if self.probs is None:
            return certain
        if self.is_certain is None:
            return self.probs[at]
        return jnp.where(self.is_certain[at][..., None], certain, self.probs[at])

    def q_tokens(self, p: Float[Array, "positions vocab"]) -> Float[Array, " drafted"]:
        """The probability that each token was drawn with."""
        places = jnp.arange(self.tokens.shape[0], dtype=jnp.int32)
        if self.probs is None:
            return jnp.ones(places.shape, p.dtype)
        q_tokens = self.probs[places, self.tokens]
        return q_tokens if self.is_certain is None else jnp.where(self.is_certain, 1.0, q_tokens)


def acceptance_probability(
    p_token: Float[Array, "*shape"], q_token: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """min(1, p / q), and 0 for a token that has probability 0 in both."""
    # A quotient alone would be infinite or NaN where q is zero.
    return jnp.where(p_token >= q_token, (p_token > 0).astype(p_token.dtype), p_token / q_token)


def residual(
    p: Float[Array, " vocab"], q: Float[Array, " vocab"], scale: Float[Array, ""] | float = 1.0
) -> Float[Array, " vocab"]:
    """max(scale * p - q, 0), normalised: after a rejection; p if it is zero everywhere."""
    difference = jnp.maximum(scale * p - q, 0.0)
    mass = difference.sum()
    return jnp.where(mass > 0, difference / jnp.where(mass > 0, mass, 1.0), p)
