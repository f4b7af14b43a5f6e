"""The empty draft: plain autoregressive decoding by the same loop."""

import jax.numpy as jnp

from spec_jax.drafters.base import Context, Draft, Drafter
from spec_jax.pytree import pytree, static


@pytree
class NoDraft(Drafter):
    """Proposes nothing.

    Attributes:
      lookahead: padding that each round scores, so that plain decoding has the shapes of another
        method.
    """

    lookahead: int = static(default=0)
    fixed_length = True

    def propose(self, state: None, context: Context) -> tuple[Draft, None]:
        """An empty draft for each row."""
        lengths = jnp.zeros_like(context.lengths)
        tokens = jnp.zeros((len(lengths), self.lookahead), jnp.int32)
        return Draft(tokens=tokens, probs=None, lengths=lengths), state
