"""What verification decides, and the ratio that every rule decides by."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Verdict(NamedTuple):
    """What verification decided.

    Attributes:
      accepted: how many draft tokens each row keeps (n).
      chosen: which of several drafts they come from.
      token: the token emitted after them, from the residual or, after a full acceptance, from p.
      valid: false where the target gave no distribution for that token (NaN or all masked).
    """

    accepted: Int[Array, " batch"]
    chosen: Int[Array, " batch"]
    token: Int[Array, " batch"]
    valid: Bool[Array, " batch"]


def chance(
    wanted: Float[Array, "*shape"], proposed: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """min(1, wanted / proposed), and 0 for a token that has probability 0 in both."""
    # Not a quotient: a q of zero and a p of zero must both come out as a probability.
    return jnp.where(wanted >= proposed, (wanted > 0).astype(wanted.dtype), wanted / proposed)
