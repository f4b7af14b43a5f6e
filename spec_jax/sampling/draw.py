"""Tokens drawn from probabilities."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key


def draw(
    keys: Key[Array, " batch"], probs: Float[Array, "batch vocab"], random: Bool[Array, ""]
) -> Int[Array, " batch"]:
    """One token per row by the Gumbel-max trick, which needs no sum along the vocabulary.

    `random` false says that every row is one-hot, so that no random number need be made.
    """

    def race() -> Array:
        gumbel = jax.vmap(lambda key: jax.random.gumbel(key, probs.shape[1:], probs.dtype))(keys)
        return jnp.argmax(jnp.log(probs) + gumbel, -1)

    return jax.lax.cond(random, race, lambda: jnp.argmax(probs, -1)).astype(jnp.int32)
