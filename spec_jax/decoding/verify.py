"""Verification: which prefix of a draft to accept, and what to emit after it. Pure, for one row.

Every rule is a few functions of the target's distributions p and the draft's q. Kept apart from
the random numbers, they can be enumerated, which is how the tests prove the rules lossless.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from spec_jax.decoding.multi_draft import AcceptedPath, follow
from spec_jax.decoding.verification import (
    RowDraft,
    Verification,
    acceptance_probability,
    residual,
)
from spec_jax.drafters.base import Draft
from spec_jax.sampling.draw import argmax, uniform
from spec_jax.sampling.keys import child_key
from spec_jax.sampling.probabilities import draw_tokens
from spec_jax.sharding import Placement

Probs = Float[Array, "positions vocab"]
"""The target's distributions after the last token of the text and after each draft token (p)."""


class VerificationRule(NamedTuple):
    """A verification rule for one row.

    Attributes:
      acceptance: (p, draft) -> the probability that each draft token passes its test,
        independently of the others.
      accepted: which draft tokens passed (bool [K]) -> how many tokens are accepted.
      next_token_probs: (p, draft, number accepted) -> distribution [V] of the token emitted after
        the accepted ones: the residual, or p if the whole draft was accepted.
    """

    acceptance: Callable[[Probs, RowDraft], Float[Array, " lookahead"]]
    accepted: Callable[[Bool[Array, " lookahead"]], Int[Array, ""]]
    next_token_probs: Callable[[Probs, RowDraft, Int[Array, ""]], Float[Array, " vocab"]]


def num_leading(passed: Bool[Array, " lookahead"]) -> Int[Array, ""]:
    """The number of draft tokens before the first that did not pass."""
    return jnp.cumprod(passed.astype(jnp.int32)).sum(dtype=jnp.int32)


def last_accepted(passed: Bool[Array, " lookahead"]) -> Int[Array, ""]:
    """The last draft token that passed, counted from one; 0 if there is none."""
    counts = jnp.arange(1, passed.shape[0] + 1, dtype=jnp.int32)
    return jnp.where(passed, counts, 0).max(initial=0)


def _next_token_probs(
    p: Probs, draft: RowDraft, accepted: Int[Array, ""], scale: Float[Array, ""] | float = 1.0
) -> Float[Array, " vocab"]:
    """The residual at the first rejected token, or p if the whole draft was accepted."""
    p_next = p[accepted]
    if draft.tokens.shape[0] == 0:
        return p_next
    q_next = draft.q(jnp.minimum(accepted, draft.tokens.shape[0] - 1), p)
    return jnp.where(accepted < draft.length, residual(p_next, q_next, scale), p_next)


def _p_tokens(p: Probs, draft: RowDraft) -> Float[Array, " lookahead"]:
    return p[jnp.arange(draft.tokens.shape[0], dtype=jnp.int32), draft.tokens]


def _token_acceptance(p: Probs, draft: RowDraft) -> Float[Array, " lookahead"]:
    return acceptance_probability(_p_tokens(p, draft), draft.q_tokens(p))


def joint_acceptance(p: Probs, draft: RowDraft) -> Float[Array, " positions"]:
    """P_i = min(P_{i-1} p(x_i) / q(x_i), 1) for i = 0..K, by which block verification decides."""

    def step(joint: Array, pair: tuple[Array, Array]) -> tuple[Array, Array]:
        p_token, q_token = pair
        joint = acceptance_probability(joint * p_token, q_token)
        return joint, joint

    one = jnp.ones((), p.dtype)
    pairs = _p_tokens(p, draft), draft.q_tokens(p)
    return jnp.concatenate([one[None], jax.lax.scan(step, one, pairs)[1]])


def _block_acceptance(p: Probs, draft: RowDraft) -> Float[Array, " lookahead"]:
    lookahead = draft.tokens.shape[0]
    if lookahead == 0:
        return jnp.zeros((0,), p.dtype)
    joint = joint_acceptance(p, draft)[1:]
    # At the position after token i the draft proposes token i + 1, if there is one.
    q_next = jnp.pad(draft.q(jnp.arange(1, lookahead, dtype=jnp.int32), p), ((0, 1), (0, 0)))
    mass = jnp.maximum(joint[:, None] * p[1:] - q_next, 0.0).sum(-1)
    # Where the target has no distribution (NaN) it ends the row, and no draft may continue.
    mass = jnp.where(p[1:].sum(-1) > 0, mass, joint)
    total = mass + (1.0 - joint)
    probability = jnp.where(total > 0, mass / jnp.where(total > 0, total, 1.0), 1.0)
    is_last = jnp.arange(1, lookahead + 1, dtype=jnp.int32) == draft.length
    return jnp.where(is_last, joint, probability)


def _block_next(p: Probs, draft: RowDraft, accepted: Int[Array, ""]) -> Float[Array, " vocab"]:
    return _next_token_probs(p, draft, accepted, joint_acceptance(p, draft)[accepted])


RULES: dict[str, VerificationRule] = {
    # Modified rejection sampling (Chen et al. 2023, arXiv 2302.01318, algorithm 2): accept x with
    # probability min(1, p(x) / q(x)), else draw from max(p - q, 0) normalised. For greedy rows,
    # whose p and q are one-hot, this is "accept while the draft is the argmax".
    "token": VerificationRule(_token_acceptance, num_leading, _next_token_probs),
    # Block verification (Sun et al. 2024, arXiv 2403.10444, algorithm 2): accept the longest
    # prefix whose last token passes, whether earlier tokens passed or not. With
    # Z = sum max(P_i p - q, 0) at the position after token i, it passes with probability
    # Z / (Z + 1 - P_i), and P_i for the last token; then draw from max(P_i p - q, 0) normalised.
    "block": VerificationRule(_block_acceptance, last_accepted, _block_next),
}


@jax.named_scope("verify")
def verify(
    verification: str,
    p: Float[Array, "batch positions vocab"],
    draft: Draft,
    keys: Key[Array, " batch"],
    placement: Placement = Placement.single_device(),
) -> Verification:
    """Accepts a prefix of a draft of each row, and draws one token after it.

    Args:
      verification: the name of the rule; several drafts of a row are verified by `follow`.
      p: the target's distributions after the last token of the text, then after each draft token,
        in the order of `Draft`; a position without a distribution holds zeros.
      draft: the proposed tokens.
      keys: each row's randomness for this round.
      placement: of the target (static).
    """

    def decide(p: Probs, draft: RowDraft, key: Array) -> AcceptedPath:
        uniforms = uniform(key, draft.tokens.shape, p.dtype)
        if num_drafts > 1 and draft.tokens.shape[0]:
            return follow(p, draft, num_drafts, uniforms)
        rule = RULES[verification]
        accepted = accepted_length(rule, uniforms, rule.acceptance(p, draft), draft.length)
        next_token_probs = rule.next_token_probs(p, draft, accepted)
        return AcceptedPath(accepted, jnp.zeros_like(accepted), next_token_probs)

    num_drafts = draft.num_drafts
    rows = RowDraft(draft.tokens, draft.probs, draft.is_certain, draft.lengths)
    acceptance_keys, token_keys = split_keys(keys)
    path = jax.vmap(decide)(p, rows, acceptance_keys)
    token = draw_tokens(token_keys[:, None], path.next_token_probs[:, None], placement)[:, 0]
    return Verification(path.accepted, path.draft_index, jnp.maximum(token, 0), token >= 0)


def split_keys(keys: Key[Array, "*lead"]) -> tuple[Key[Array, "*lead"], Key[Array, "*lead"]]:
    """Keys of the acceptance, and of the token after it; they must share no random number."""
    return child_key(keys, 0), child_key(keys, 1)


@jax.named_scope("verify")
def draw_target_tokens(
    p: Float[Array, "batch positions vocab"],
    keys: Key[Array, "batch depths"],
    num_drafts: int,
    placement: Placement = Placement.single_device(),
    num_tokens: Int[Array, " batch"] | None = None,
) -> Int[Array, "batch positions"]:
    """A token from each of the target's distributions; -1 where there is none.

    Args:
      p: like `verify`'s.
      keys: of the token after the text, and of the token after each step of a draft. Drafts of a
        row share them: only one of their tokens can be the row's.
      num_drafts: drafts of each row; static.
      placement: of the target (static).
      num_tokens: how many positions of each row are real; None for all.
    """
    keys = jnp.concatenate([keys[:, :1], jnp.repeat(keys[:, 1:], num_drafts, axis=1)], axis=1)
    return draw_tokens(keys, p, placement, num_tokens)


@jax.named_scope("verify")
def verify_equal(target_tokens: Int[Array, "batch positions"], draft: Draft) -> Verification:
    """Accepts the longest prefix of a draft that equals the target's tokens.

    Given the target's likeliest tokens, it decides like every rule for greedy rows, whatever q the
    draft was drawn from. Given tokens drawn from p, it is `coupled` verification: the text is the
    one that plain decoding draws with the same random numbers. Of several drafts the one that
    agrees the longest is accepted, the first of them if several do.

    Args:
      target_tokens: the target's tokens at the places of `verify`'s p; -1 where it gives no
        distribution.
      draft: the proposed tokens.
    """
    batch, steps, num_drafts = len(target_tokens), draft.lookahead, draft.num_drafts
    first = jnp.repeat(target_tokens[:, :1], num_drafts, axis=1)
    targets = jnp.concatenate([first, target_tokens[:, 1:]], axis=1)
    targets = targets.reshape(batch, steps + 1, num_drafts)
    is_drafted = jnp.arange(steps, dtype=jnp.int32)[None] < draft.lengths[:, None]
    passed = draft.tokens.reshape(batch, steps, num_drafts) == targets[:, :-1]
    # The token -1 ends a draft, and does not agree with a target that has no token either.
    passed = passed & (targets[:, :-1] >= 0) & is_drafted[..., None]
    counts = jnp.cumprod(passed.astype(jnp.int32), axis=1).sum(1, dtype=jnp.int32)
    accepted, draft_index = counts.max(-1), argmax(counts)
    token = targets[jnp.arange(batch, dtype=jnp.int32), accepted, draft_index]
    return Verification(accepted, draft_index, jnp.maximum(token, 0), token >= 0)


def accepted_length(
    rule: VerificationRule,
    uniforms: Float[Array, " lookahead"],
    acceptance: Float[Array, " lookahead"],
    length: Int[Array, ""],
) -> Int[Array, ""]:
    """How many of a draft's tokens the rule accepts, given uniforms in [0, 1)."""
    positions = jnp.arange(uniforms.shape[0], dtype=jnp.int32)
    return rule.accepted((uniforms < acceptance) & (positions < length))
