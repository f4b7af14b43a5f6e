"""Verification: which prefix of a draft to keep, and what to emit after it. Pure, for one row.

Every rule is two functions of the target's distributions p and the draft's q: the probability
of accepting each draft token, and the distribution of the token after the kept prefix. Kept apart
from the random numbers, they can be enumerated, which is how the tests prove the rules lossless.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from spec_jax.decoding.sampling import draw
from spec_jax.drafters.base import Draft


class Rule(NamedTuple):
    """A verification rule for one row.

    Attributes:
      acceptance: (p [K+1, V], tokens [K], q [K, V] or None) -> probability of accepting each
        token, given that all before it were accepted.
      following: (p, tokens, q, number accepted, draft length) -> distribution [V] of the token
        emitted after the accepted ones: the residual, or p if the whole draft was accepted.
    """

    acceptance: Callable[[Array, Array, Array | None], Array]
    following: Callable[[Array, Array, Array | None, Array, Array], Array]


def _token_acceptance(
    p: Float[Array, "places vocab"],
    tokens: Int[Array, " lookahead"],
    q: Float[Array, "lookahead vocab"] | None,
) -> Float[Array, " lookahead"]:
    places = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    wanted = p[places, tokens]
    if q is None:
        return wanted
    proposed = q[places, tokens]
    # Not a quotient: a q of zero and a p of zero must both come out as a probability.
    return jnp.where(wanted >= proposed, (wanted > 0).astype(p.dtype), wanted / proposed)


def _token_following(
    p: Float[Array, "places vocab"],
    tokens: Int[Array, " lookahead"],
    q: Float[Array, "lookahead vocab"] | None,
    accepted: Int[Array, ""],
    length: Int[Array, ""],
) -> Float[Array, " vocab"]:
    wanted = p[accepted]
    if tokens.shape[0] == 0:
        return wanted
    place = jnp.minimum(accepted, tokens.shape[0] - 1)
    proposed = jax.nn.one_hot(tokens[place], p.shape[1], dtype=p.dtype) if q is None else q[place]
    residual = jnp.maximum(wanted - proposed, 0.0)
    mass = residual.sum()
    rejected = (accepted < length) & (mass > 0)
    return jnp.where(rejected, residual / jnp.where(rejected, mass, 1.0), wanted)


def _greedy_acceptance(
    p: Float[Array, "places vocab"],
    tokens: Int[Array, " lookahead"],
    q: Float[Array, "lookahead vocab"] | None,
) -> Float[Array, " lookahead"]:
    best = jnp.argmax(p[:-1], -1).astype(tokens.dtype)
    return ((tokens == best) & (p[:-1].max(-1) > 0)).astype(p.dtype)


def _greedy_following(
    p: Float[Array, "places vocab"],
    tokens: Int[Array, " lookahead"],
    q: Float[Array, "lookahead vocab"] | None,
    accepted: Int[Array, ""],
    length: Int[Array, ""],
) -> Float[Array, " vocab"]:
    wanted = p[accepted]
    best = jax.nn.one_hot(jnp.argmax(wanted), p.shape[1], dtype=p.dtype)
    return jnp.where(wanted.max() > 0, best, wanted)


RULES: dict[str, Rule] = {
    # Modified rejection sampling (Chen et al. 2023, arXiv 2302.01318, algorithm 2): accept x with
    # probability min(1, p(x) / q(x)), else draw from max(p - q, 0) normalised. For greedy rows,
    # whose p and q are one-hot, this is "keep while the draft is the argmax".
    "token": Rule(_token_acceptance, _token_following),
    # The longest prefix equal to the target's argmax; exact at temperature 0 only.
    "greedy": Rule(_greedy_acceptance, _greedy_following),
}


class Verdict(NamedTuple):
    """What verification decided.

    Attributes:
      accepted: how many draft tokens each row keeps (n).
      token: the token emitted after them, from the residual or, after a full acceptance, from p.
      valid: false where the target gave no distribution for that token (NaN or all masked).
    """

    accepted: Int[Array, " batch"]
    token: Int[Array, " batch"]
    valid: Bool[Array, " batch"]


def accepted_length(
    uniforms: Float[Array, " lookahead"],
    acceptance: Float[Array, " lookahead"],
    length: Int[Array, ""],
) -> Int[Array, ""]:
    """The number of leading draft tokens whose uniform in [0, 1) is below their acceptance."""
    places = jnp.arange(uniforms.shape[0], dtype=jnp.int32)
    kept = (uniforms < acceptance) & (places < length)
    return jnp.cumprod(kept.astype(jnp.int32)).sum(dtype=jnp.int32)


def verify(
    rule: Rule,
    p: Float[Array, "batch places vocab"],
    draft: Draft,
    keys: Key[Array, " batch"],
    random: Bool[Array, ""],
) -> Verdict:
    """Keeps a prefix of each row's draft and draws one token after it.

    Args:
      rule: the verification rule.
      p: the target's distributions after the last known token and after each draft token;
        a place without a distribution holds zeros.
      draft: what was proposed.
      keys: each row's randomness for this round.
      random: whether any row samples; false spares the greedy batch its random numbers.
    """

    def decide(p, tokens, q, length, key):
        acceptance = rule.acceptance(p, tokens, q)
        uniforms = jax.random.uniform(key, tokens.shape, p.dtype)
        accepted = accepted_length(uniforms, acceptance, length)
        return accepted, rule.following(p, tokens, q, accepted, length)

    # The acceptance and the token after it must not share a random number.
    halves = jax.vmap(lambda key: jax.random.split(key))(keys)
    in_axes = (0, 0, None if draft.probs is None else 0, 0, 0)
    accepted, following = jax.vmap(decide, in_axes)(
        p, draft.tokens, draft.probs, draft.lengths, halves[:, 0]
    )
    token = draw(halves[:, 1], following, random)
    return Verdict(accepted=accepted, token=token, valid=following.sum(-1) > 0)
