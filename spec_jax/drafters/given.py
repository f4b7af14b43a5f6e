"""Drafts from the host: each round proposes the tokens that the host has put into the state."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax.drafters.base import Committed, Context, Draft, Drafter, DrafterPrompt
from spec_jax.sharding.pytree import pytree, static


@pytree
class GivenDraft:
    """The host's draft for the next round: tokens, and how many of them count."""

    tokens: Int[Array, "batch lookahead"]
    lengths: Int[Array, " batch"]


@pytree
class Given(Drafter):
    """Proposes the host's tokens as a deterministic draft.

    Attributes:
      lookahead: most tokens proposed per round (K).
    """

    lookahead: int = static()

    def init(self, prompt: DrafterPrompt) -> GivenDraft:
        """Nothing yet."""
        batch = len(prompt.lengths)
        shape = (batch, self.lookahead)
        return GivenDraft(jnp.zeros(shape, jnp.int32), jnp.zeros((batch,), jnp.int32))

    def propose(self, state: GivenDraft, context: Context) -> tuple[Draft, GivenDraft]:
        """The host's tokens; q is one-hot."""
        return Draft(tokens=state.tokens, probs=None, lengths=state.lengths), state

    def commit(self, state: GivenDraft, committed: Committed) -> GivenDraft:
        """Clears the draft, so that no token is proposed twice."""
        return GivenDraft(state.tokens, jnp.zeros_like(state.lengths))
