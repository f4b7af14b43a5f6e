"""The empty draft: plain autoregressive decoding by the same loop."""

import jax.numpy as jnp

from spec_jax.drafters.base import Committed, Context, Draft, Drafter, DrafterPrompt
from spec_jax.sharding.pytree import pytree, static


@pytree
class NoDraft(Drafter):
    """Proposes nothing.

    Attributes:
      lookahead: tokens that a round scores besides the one that it decodes, to no purpose but to
        compute as rounds of other drafters do.
    """

    lookahead: int = static(default=0)
    steady = True

    def init(self, prompt: DrafterPrompt) -> None:
        """No state."""

    def propose(self, state: None, context: Context) -> tuple[Draft, None]:
        """An empty draft for each row."""
        batch = context.lengths.shape[0]
        return (
            Draft(
                tokens=jnp.zeros((batch, self.lookahead), jnp.int32),
                probs=None,
                lengths=jnp.zeros((batch,), jnp.int32),
            ),
            state,
        )

    def commit(self, state: None, committed: Committed) -> None:
        """No state."""
