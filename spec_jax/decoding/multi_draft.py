"""Verification of several drafts of a row by recursive rejection sampling. Pure, for one row.

The i-th tokens of drafts with a common prefix are candidates for the token after that prefix. They
were drawn from q independently, so they can be tried one after another: accept candidate x with
probability min(1, r(x) / q(x)), where r is p at first and after each rejection max(r - q, 0)
normalised; if all are rejected, emit a token drawn from r (SpecInfer: Miao et al. 2023, arXiv
2305.09781, section 4.3; SpecTr: Sun et al. 2023, arXiv 2310.15141). After an acceptance continue
with all drafts that begin with the accepted tokens, tried before or not: their next tokens were
drawn given the same prefix, independently of the accepted tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.decoding.verification import RowDraft, acceptance_probability, residual


def node(step: Int[Array, ""], draft_index: Int[Array, ""], num_drafts: int) -> Int[Array, ""]:
    """The query position after the token of a draft in a step, as an index into `p`."""
    return 1 + step * num_drafts + draft_index


class AcceptedPath(NamedTuple):
    """How far verification went along one of a row's drafts.

    Attributes:
      accepted: how many tokens are accepted.
      draft_index: the draft that they come from.
      next_token_probs: the distribution of the token after them.
      acceptance: the acceptance probability of each candidate of several drafts; NaN if it was not
        tried.
    """

    accepted: Int[Array, ""]
    draft_index: Int[Array, ""]
    next_token_probs: Float[Array, " vocab"]
    acceptance: Float[Array, "steps drafts"] | None = None


def follow(
    p: Float[Array, "positions vocab"],
    draft: RowDraft,
    num_drafts: int,
    uniforms: Float[Array, " drafted"],
) -> AcceptedPath:
    """Tries the candidates of each step in turn; one uniform in [0, 1) decides each."""
    steps = draft.tokens.shape[0] // num_drafts

    def step(carry: tuple, i: Int[Array, ""]) -> tuple:
        accepted, draft_index, alive, remainder = carry
        is_open = (accepted == i) & (i < draft.length)
        is_accepted = jnp.zeros((), bool)
        tried_acceptance = []
        tokens = jax.lax.dynamic_slice_in_dim(draft.tokens, i * num_drafts, num_drafts)
        for n in range(num_drafts):
            at = i * num_drafts + n
            q = draft.q(at, p)
            # A draft that has ended has the token -1 and no candidate.
            tried = is_open & alive[n] & ~is_accepted & (tokens[n] >= 0)
            token = jnp.maximum(tokens[n], 0)
            probability = acceptance_probability(remainder[token], q[token])
            taken = tried & (uniforms[at] < probability)
            draft_index = jnp.where(taken, n, draft_index)
            remainder = jnp.where(tried & ~taken, residual(remainder, q), remainder)
            is_accepted = is_accepted | taken
            tried_acceptance.append(jnp.where(tried, probability, jnp.nan))
        alive = alive & (tokens == tokens[draft_index])
        accepted = accepted + is_accepted.astype(jnp.int32)
        remainder = jnp.where(is_accepted, p[node(i, draft_index, num_drafts)], remainder)
        return (accepted, draft_index, alive, remainder), jnp.stack(tried_acceptance)

    zero = jnp.int32(0)
    start = (zero, zero, jnp.ones((num_drafts,), bool), p[0])
    end, tried = jax.lax.scan(step, start, jnp.arange(steps, dtype=jnp.int32))
    accepted, draft_index, _, next_token_probs = end
    return AcceptedPath(accepted, draft_index, next_token_probs, tried)
