"""Drafts from the host: each round proposes the tokens that the host has put into the state."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax.drafters.base import Committed, Context, Draft, Drafter, DrafterPrompt
from spec_jax.pytree import pytree, static


@pytree
class HostTokens:
    """The host's draft for the next round: tokens, and how many of them count."""

    tokens: Int[Array, "batch lookahead"]
    lengths: Int[Array, " batch"]


@pytree
class HostDraft(Drafter):
    """Proposes the host's tokens as a deterministic draft.

    Attributes:
      lookahead: the largest number of tokens proposed per round (K).
    """

    lookahead: int = static()

    def init(self, prompt: DrafterPrompt) -> HostTokens:
        """No tokens yet."""
        batch = len(prompt.lengths)
        tokens = jnp.zeros((batch, self.lookahead), jnp.int32)
        return HostTokens(tokens, jnp.zeros((batch,), jnp.int32))

    def propose(self, state: HostTokens, context: Context) -> tuple[Draft, HostTokens]:
        """The host's tokens; q is one-hot."""
        return Draft(tokens=state.tokens, probs=None, lengths=state.lengths), state

    def commit(self, state: HostTokens, committed: Committed) -> HostTokens:
        """Clears the draft, so that no token is proposed twice."""
        return dataclasses.replace(state, lengths=jnp.zeros_like(state.lengths))
