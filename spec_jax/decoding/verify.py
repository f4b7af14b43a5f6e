"""Verification: which prefix of a draft to keep, and what to emit after it. Pure, for one row.

Every rule is a few functions of the target's distributions p and the draft's q. Kept apart from
the random numbers, they can be enumerated, which is how the tests prove the rules lossless.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from spec_jax.decoding.several import verify_several
from spec_jax.decoding.verdict import Verdict, chance
from spec_jax.drafters.base import Draft
from spec_jax.sampling.draw import draw, largest, uniform


def leading(kept: Bool[Array, " lookahead"]) -> Int[Array, ""]:
    """The number of draft tokens before the first that is not kept."""
    return jnp.cumprod(kept.astype(jnp.int32)).sum(dtype=jnp.int32)


def last(kept: Bool[Array, " lookahead"]) -> Int[Array, ""]:
    """The last draft token that is kept, counted from one; 0 if none is."""
    counts = jnp.arange(1, kept.shape[0] + 1, dtype=jnp.int32)
    return jnp.where(kept, counts, 0).max(initial=0)


class Rule(NamedTuple):
    """A verification rule for one row.

    Attributes:
      acceptance: (p [K+1, V], tokens [K], q [K, V] or None, draft length) -> probability that
        each draft token is kept, independently of the others.
      accepted: which draft tokens are kept (bool [K]) -> how many tokens are accepted.
      following: (p, tokens, q, number accepted, draft length) -> distribution [V] of the token
        emitted after the accepted ones: the residual, or p if the whole draft was accepted.
    """

    acceptance: Callable[[Array, Array, Array | None, Array], Array]
    accepted: Callable[[Array], Array]
    following: Callable[[Array, Array, Array | None, Array, Array], Array]


def _token_acceptance(
    p: Float[Array, "positions vocab"],
    tokens: Int[Array, " lookahead"],
    q: Float[Array, "lookahead vocab"] | None,
    length: Int[Array, ""],
) -> Float[Array, " lookahead"]:
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    wanted = p[positions, tokens]
    if q is None:
        return wanted
    return chance(wanted, q[positions, tokens])


def _token_following(
    p: Float[Array, "positions vocab"],
    tokens: Int[Array, " lookahead"],
    q: Float[Array, "lookahead vocab"] | None,
    accepted: Int[Array, ""],
    length: Int[Array, ""],
) -> Float[Array, " vocab"]:
    return _residual(p, tokens, q, accepted, length, jnp.ones((), p.dtype))


def _residual(
    p: Array, tokens: Array, q: Array | None, accepted: Array, length: Array, scale: Array
) -> Float[Array, " vocab"]:
    """max(scale * p - q, 0), normalised, at the first refused token; p if none was refused."""
    wanted = p[accepted]
    if tokens.shape[0] == 0:
        return wanted
    position = jnp.minimum(accepted, tokens.shape[0] - 1)
    residual = jnp.maximum(scale * wanted - _proposed(p, tokens, q)[position], 0.0)
    mass = residual.sum()
    rejected = (accepted < length) & (mass > 0)
    return jnp.where(rejected, residual / jnp.where(rejected, mass, 1.0), wanted)


def _proposed(p: Array, tokens: Array, q: Array | None) -> Float[Array, "lookahead vocab"]:
    return jax.nn.one_hot(tokens, p.shape[1], dtype=p.dtype) if q is None else q


def joint_acceptance(p: Array, tokens: Array, q: Array | None) -> Float[Array, " positions"]:
    """P_i = min(P_{i-1} p(x_i) / q(x_i), 1) for i = 0..K, by which block verification decides."""
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    wanted = p[positions, tokens]
    proposed = jnp.ones_like(wanted) if q is None else q[positions, tokens]

    def step(joint: Array, each: tuple[Array, Array]) -> tuple[Array, Array]:
        wanted, proposed = each
        joint = chance(joint * wanted, proposed)
        return joint, joint

    one = jnp.ones((), p.dtype)
    return jnp.concatenate([one[None], jax.lax.scan(step, one, (wanted, proposed))[1]])


def _block_acceptance(
    p: Float[Array, "positions vocab"],
    tokens: Int[Array, " lookahead"],
    q: Float[Array, "lookahead vocab"] | None,
    length: Int[Array, ""],
) -> Float[Array, " lookahead"]:
    lookahead = tokens.shape[0]
    if lookahead == 0:
        return jnp.zeros((0,), p.dtype)
    joint = joint_acceptance(p, tokens, q)[1:]
    # At the position after token i the draft proposes token i + 1, if there is one.
    proposed = jnp.pad(_proposed(p, tokens, q)[1:], ((0, 1), (0, 0)))
    left = jnp.maximum(joint[:, None] * p[1:] - proposed, 0.0).sum(-1)
    # Where the target has no distribution (NaN) it ends the row, and no draft may go on.
    left = jnp.where(p[1:].sum(-1) > 0, left, joint)
    total = left + (1.0 - joint)
    going_on = jnp.where(total > 0, left / jnp.where(total > 0, total, 1.0), 1.0)
    is_last = jnp.arange(1, lookahead + 1, dtype=jnp.int32) == length
    return jnp.where(is_last, joint, going_on)


def _block_following(
    p: Float[Array, "positions vocab"],
    tokens: Int[Array, " lookahead"],
    q: Float[Array, "lookahead vocab"] | None,
    accepted: Int[Array, ""],
    length: Int[Array, ""],
) -> Float[Array, " vocab"]:
    return _residual(p, tokens, q, accepted, length, joint_acceptance(p, tokens, q)[accepted])


def _greedy_acceptance(
    p: Float[Array, "positions vocab"],
    tokens: Int[Array, " lookahead"],
    q: Float[Array, "lookahead vocab"] | None,
    length: Int[Array, ""],
) -> Float[Array, " lookahead"]:
    best = largest(p[:-1])
    return ((tokens == best) & (p[:-1].max(-1) > 0)).astype(p.dtype)


def _greedy_following(
    p: Float[Array, "positions vocab"],
    tokens: Int[Array, " lookahead"],
    q: Float[Array, "lookahead vocab"] | None,
    accepted: Int[Array, ""],
    length: Int[Array, ""],
) -> Float[Array, " vocab"]:
    wanted = p[accepted]
    best = jax.nn.one_hot(largest(wanted), p.shape[1], dtype=p.dtype)
    return jnp.where(wanted.max() > 0, best, wanted)


RULES: dict[str, Rule] = {
    # Modified rejection sampling (Chen et al. 2023, arXiv 2302.01318, algorithm 2): accept x with
    # probability min(1, p(x) / q(x)), else draw from max(p - q, 0) normalised. For greedy rows,
    # whose p and q are one-hot, this is "keep while the draft is the argmax".
    "token": Rule(_token_acceptance, leading, _token_following),
    # Block verification (Sun et al. 2024, arXiv 2403.10444, algorithm 2): accept the longest
    # prefix whose own test succeeds, so that a later success keeps earlier tokens. With
    # Z = sum max(P_i p - q, 0) at the position after token i, it succeeds with probability
    # Z / (Z + 1 - P_i), and P_i for the last token; then draw from max(P_i p - q, 0) normalised.
    "block": Rule(_block_acceptance, last, _block_following),
    # The longest prefix equal to the target's argmax; exact at temperature 0 only.
    "greedy": Rule(_greedy_acceptance, leading, _greedy_following),
}


@jax.named_scope("verify")
def verify(
    verification: str,
    p: Float[Array, "batch positions vocab"],
    draft: Draft,
    keys: Key[Array, " batch"],
    random: bool = True,
) -> Verdict:
    """Keeps a prefix of each row's draft and draws one token after it.

    Args:
      verification: the name of the rule; several drafts of a row have a rule of their own.
      p: the target's distributions after the last known token and after each draft token;
        a position without a distribution holds zeros.
      draft: what was proposed.
      keys: each row's randomness for this round.
      random: whether any row samples; static.
    """
    if draft.drafts > 1 and draft.lookahead > 0:
        return verify_several(p, draft, keys, random)
    rule = RULES[verification]

    def decide(p, tokens, q, length, key):
        acceptance = rule.acceptance(p, tokens, q, length)
        uniforms = uniform(key, tokens.shape, p.dtype)
        accepted = accepted_length(rule, uniforms, acceptance, length)
        return accepted, rule.following(p, tokens, q, accepted, length)

    # The acceptance and the token after it must not share a random number.
    halves = jax.vmap(lambda key: jax.random.split(key))(keys)
    in_axes = (0, 0, None if draft.probs is None else 0, 0, 0)
    accepted, following = jax.vmap(decide, in_axes)(
        p, draft.tokens, draft.probs, draft.lengths, halves[:, 0]
    )
    return Verdict(
        accepted=accepted,
        chosen=jnp.zeros_like(accepted),
        token=draw(halves[:, 1], following, random),
        valid=following.sum(-1) > 0,
    )


def accepted_length(
    rule: Rule,
    uniforms: Float[Array, " lookahead"],
    acceptance: Float[Array, " lookahead"],
    length: Int[Array, ""],
) -> Int[Array, ""]:
    """How many of a draft's tokens the rule accepts, given uniforms in [0, 1)."""
    positions = jnp.arange(uniforms.shape[0], dtype=jnp.int32)
    return rule.accepted((uniforms < acceptance) & (positions < length))
