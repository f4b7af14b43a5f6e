"""The input of an encoder."""

import numpy as np
from jaxtyping import Array, Float, Int

from spec_jax.pytree import pytree


@pytree
class EncoderInput:
    """The input of an encoder; padding follows each row.

    Attributes:
      values: token ids, or frames of a spectrum.
      lengths: positions of each row, at least one: tokens, or half as many as frames.
      hidden: the output of the target's encoder, for drafters that share it.
    """

    values: Int[Array | np.ndarray, "batch source"] | Float[Array | np.ndarray, "batch frames bins"]
    lengths: Int[Array | np.ndarray, " batch"]
    hidden: Float[Array, "batch positions embed"] | None = None
