"""What verification decides."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Int


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
