"""Verification of several drafts of a row by recursive rejection sampling. Pure, for one row.

The i-th tokens of drafts with a common prefix are candidates for the token after that prefix. They
were drawn from q independently, so they can be tried one after another: accept candidate x with
probability min(1, r(x) / q(x)), where r is p at first and after each refusal max(r - q, 0)
normalised; if all are refused, emit a token drawn from r (SpecInfer: Miao et al. 2023, arXiv
2305.09781, section 4.3; SpecTr: Sun et al. 2023, arXiv 2310.15141). After an acceptance continue
with all drafts that begin with the accepted tokens, tried before or not: their next tokens were
drawn given the same prefix, independently of the verdict.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from spec_jax.decoding.verdict import Verdict, chance
from spec_jax.drafters.base import Draft
from spec_jax.sampling.draw import draw, uniform


def node(step: Int[Array, ""], chosen: Int[Array, ""], drafts: int) -> Int[Array, ""]:
    """The query position after `step` tokens of a draft, as an index into `p`."""
    return jnp.where(step == 0, 0, 1 + (step - 1) * drafts + chosen)


def refuse(residual: Float[Array, " vocab"], q: Float[Array, " vocab"]) -> Float[Array, " vocab"]:
    """The residual distribution after a candidate drawn from q was refused."""
    left = jnp.maximum(residual - q, 0.0)
    mass = left.sum()
    return jnp.where(mass > 0, left / jnp.where(mass > 0, mass, 1.0), residual)


def acceptance(
    residual: Float[Array, " vocab"], q: Float[Array, " vocab"], token: Int[Array, ""]
) -> Float[Array, ""]:
    """The probability of accepting a candidate; 0 for a draft that has none (-1)."""
    at = jnp.maximum(token, 0)
    return jnp.where(token < 0, 0.0, chance(residual[at], q[at]))


class Path(NamedTuple):
    """How far verification went along one of a row's drafts.

    Attributes:
      accepted: how many tokens are kept.
      chosen: the draft that they come from.
      following: the distribution of the token after them.
      chances: the acceptance probability of each candidate; NaN if it was not tried.
    """

    accepted: Int[Array, ""]
    chosen: Int[Array, ""]
    following: Float[Array, " vocab"]
    chances: Float[Array, "steps drafts"]


def follow(
    p: Float[Array, "positions vocab"],
    tokens: Int[Array, "steps drafts"],
    q: Float[Array, "drafted vocab"] | None,
    length: Int[Array, ""],
    uniforms: Float[Array, "steps drafts"],
) -> Path:
    """Tries the candidates of each step in turn; one uniform in [0, 1) decides each."""
    steps, drafts = tokens.shape

    def step(carry, i):
        accepted, chosen, alive, residual = carry
        going = (accepted == i) & (i < length)
        found = jnp.zeros((), bool)
        chances = []
        for n in range(drafts):
            token = tokens[i, n]
            if q is None:
                proposed = jax.nn.one_hot(token, p.shape[1], dtype=p.dtype)
            else:
                proposed = q[i * drafts + n]
            tried = going & alive[n] & ~found & (token >= 0)
            keep = acceptance(residual, proposed, token)
            taken = tried & (uniforms[i, n] < keep)
            chosen = jnp.where(taken, n, chosen)
            residual = jnp.where(tried & ~taken, refuse(residual, proposed), residual)
            found = found | taken
            chances.append(jnp.where(tried, keep, jnp.nan))
        alive = alive & (tokens[i] == tokens[i, chosen])
        accepted = accepted + found.astype(jnp.int32)
        residual = jnp.where(found, p[node(i + 1, chosen, drafts)], residual)
        return (accepted, chosen, alive, residual), jnp.stack(chances)

    zero = jnp.int32(0)
    start = (zero, zero, jnp.ones((drafts,), bool), p[0])
    end, chances = jax.lax.scan(step, start, jnp.arange(steps, dtype=jnp.int32))
    accepted, chosen, _, following = end
    return Path(accepted, chosen, following, chances)


def verify_several(
    p: Float[Array, "batch positions vocab"],
    draft: Draft,
    keys: Key[Array, " batch"],
    random: bool = True,
) -> Verdict:
    """Keeps a prefix of one of each row's drafts and draws one token after it.

    Args:
      p: the target's distributions after the last known token, then after each draft token,
        step by step as `Draft` has them.
      draft: what was proposed.
      keys: each row's randomness for this round.
      random: whether any row samples; static.
    """
    drafts, steps = draft.drafts, draft.lookahead

    def decide(p, tokens, q, length, key):
        uniforms = uniform(key, (steps, drafts), p.dtype)
        return follow(p, tokens.reshape(steps, drafts), q, length, uniforms)

    halves = jax.vmap(lambda key: jax.random.split(key))(keys)
    in_axes = (0, 0, None if draft.probs is None else 0, 0, 0)
    path = jax.vmap(decide, in_axes)(p, draft.tokens, draft.probs, draft.lengths, halves[:, 0])
    return Verdict(
        accepted=path.accepted,
        chosen=path.chosen,
        token=draw(halves[:, 1], path.following, random),
        valid=path.following.sum(-1) > 0,
    )
