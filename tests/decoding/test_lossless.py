"""The proof: over every draft, the joint distribution of what is emitted is the target's own.

Rounds are enumerated through the very functions that the loop calls, in float64: for each context
and each possible draft, every outcome of the verification with its probability, then the rounds
that fill the rest of the first K + 1 tokens.
"""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_jax.decoding import verify
from spec_jax.decoding.verification import RowDraft
from spec_jax.decoding.verify import RULES, accepted_length, num_leading

TOLERANCE = 1e-12
ROWS = 128
"""Contexts and drafts of a problem: at most 5^3."""


@partial(jax.jit, static_argnames="rule")
def outcomes(p, drafts, *, rule):
    """For each row: P(n accepted) for n = 0..k, and the distribution of the token after them."""

    def row(p, draft):
        k = draft.tokens.shape[0]
        accept = RULES[rule].acceptance(p, draft)
        accept = jnp.where(jnp.arange(k, dtype=jnp.int32) < draft.length, accept, 0.0)
        # Every outcome of the coins, and how many tokens the rule makes of it.
        coins = jnp.asarray(list(itertools.product([False, True], repeat=k)), bool).reshape(2**k, k)
        chance = jnp.where(coins, accept[None], 1.0 - accept[None]).prod(-1)
        counts = jnp.arange(k + 1, dtype=jnp.int32)
        kept = jax.vmap(RULES[rule].accepted)(coins)
        count_probs = jnp.where(kept[:, None] == counts[None], chance[:, None], 0.0).sum(0)
        after = jax.vmap(lambda n: RULES[rule].next_token_probs(p, draft, n))(counts)
        return count_probs, after

    return jax.vmap(row)(p, drafts)


def emitted_joint(p, q, stops, *, rule="token", deterministic=False, certain=None):
    """The joint distribution [V] * (K + 1) of the first K + 1 tokens that rounds emit.

    Args:
      p: p[c] is [V**c, V]: the target after each context of c tokens, c = 0..K.
      q: q[c] is the draft's, c = 0..K - 1.
      stops: stops[c] is bool [V**c]: the drafter stops drafting at these contexts, so a draft's
        length may depend on its own tokens.
      rule: the verification rule.
      deterministic: hand the rule None for q, as a drafter with one-hot q does.
      certain: certain[c] is bool [V**c]: the drafter is deterministic at these contexts, where q is
        one-hot, and hands the rule a mask with NaN for these rows of q.
    """
    vocab, horizon = p[0].shape[1], len(p)
    joint = [np.ones((vocab**horizon, 1))]  # joint[-1 - c]: after c tokens, over the rest
    for c in reversed(range(horizon)):
        k = horizon - 1 - c  # the loop drafts no more than can still be emitted besides one token
        contexts, drafts = vocab**c, vocab**k
        rows = np.arange(contexts * drafts)
        prefixes = [rows // vocab ** (k - j) for j in range(k + 1)]
        tokens = np.zeros((len(rows), k), np.int32)
        q_rows = np.zeros((len(rows), k, vocab))
        p_rows = np.stack([p[c + j][prefixes[j]] for j in range(k + 1)], 1)
        going = np.ones(len(rows), bool)
        lengths = np.zeros(len(rows), np.int32)
        chance = np.ones(len(rows))
        mask = None if certain is None else np.zeros((len(rows), k), bool)
        for j in range(k):
            tokens[:, j], q_rows[:, j] = prefixes[j + 1] % vocab, q[c + j][prefixes[j]]
            going &= ~stops[c + j][prefixes[j]]
            lengths += going
            chance *= q_rows[np.arange(len(rows)), j, tokens[:, j]]
            if mask is not None:
                mask[:, j] = certain[c + j][prefixes[j]]
                q_rows[mask[:, j], j] = np.nan
        # The last row again and again, so that fewer programs are compiled.
        padded = np.minimum(np.arange(max(len(rows), ROWS)), len(rows) - 1)
        draft = RowDraft(
            tokens[padded],
            None if deterministic else q_rows[padded],
            None if mask is None else mask[padded],
            lengths[padded],
        )
        count_probs, after = outcomes(p_rows[padded], draft, rule=rule)
        assert after.dtype == jnp.float64
        count_probs, after = np.asarray(count_probs)[: len(rows)], np.asarray(after)[: len(rows)]
        here = np.zeros((contexts, vocab ** (k + 1)))
        for n in range(k + 1):
            weight = (chance * count_probs[:, n])[:, None] * after[:, n]
            # Draft tokens past the accepted ones were thrown away: sum over them.
            emitted = weight.reshape(contexts * vocab**n, vocab ** (k - n), vocab).sum(1)
            rest = joint[n].reshape(contexts * vocab**n, vocab, -1)
            here += (emitted[:, :, None] * rest).reshape(contexts, -1)
        joint.insert(0, here)
    return joint[0].reshape((vocab,) * horizon)


def target_joint(p):
    vocab = p[0].shape[1]
    joint = np.ones((1, 1))
    for table in p:
        joint = joint.reshape(-1, 1) * table
    return joint.reshape((vocab,) * len(p))


def table(rng, rows, vocab, *, zeros):
    weights = rng.dirichlet(np.full(vocab, 0.7), rows)
    if zeros:
        weights = weights * (rng.random((rows, vocab)) < 0.6)
        weights[np.arange(rows), rng.integers(vocab, size=rows)] += 0.1
    return weights / weights.sum(1, keepdims=True)


def one_hot(rng, rows, vocab):
    return np.eye(vocab)[rng.integers(vocab, size=rows)]


@st.composite
def problems(draw):
    vocab, lookahead = draw(st.integers(2, 5)), draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["any", "zeros", "equal", "disjoint", "nearly equal"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    zeros = kind == "zeros"
    p = [table(rng, vocab**c, vocab, zeros=zeros) for c in range(lookahead + 1)]
    q = [table(rng, vocab**c, vocab, zeros=zeros) for c in range(lookahead)]
    if kind == "equal":
        q = p[:-1]
    if kind == "nearly equal":
        q = [t * (1 + 1e-9 * rng.standard_normal(t.shape)) for t in p[:-1]]
        q = [t / t.sum(1, keepdims=True) for t in q]
    if kind == "disjoint":
        side = np.arange(vocab) < vocab // 2
        p = [t * side / (t * side).sum(1, keepdims=True) for t in p]
        q = [t * ~side / (t * ~side).sum(1, keepdims=True) for t in q]
    early = draw(st.sampled_from([0.0, 0.3]))
    stops = [rng.random(vocab**c) < early for c in range(lookahead)]
    return p, q, stops, rng


@pytest.mark.parametrize("rule", ["token", "block"])
@settings(max_examples=250)
@given(problem=problems())
def test_verification_emits_the_targets_joint_distribution(rule, problem):
    p, q, stops, _ = problem
    with jax.enable_x64(True):
        emitted = emitted_joint(p, q, stops, rule=rule)
        np.testing.assert_allclose(emitted, target_joint(p), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("rule", ["token", "block"])
@settings(max_examples=100)
@given(problem=problems())
def test_a_deterministic_drafter_is_lossless_too(rule, problem):
    p, q, stops, rng = problem
    q = [one_hot(rng, *t.shape) for t in q]
    with jax.enable_x64(True):
        emitted = emitted_joint(p, q, stops, rule=rule, deterministic=True)
        np.testing.assert_allclose(emitted, target_joint(p), rtol=0, atol=TOLERANCE)
        reported = emitted_joint(p, q, stops, rule=rule)
        np.testing.assert_allclose(reported, emitted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("rule", ["token", "block"])
@settings(max_examples=150)
@given(problem=problems())
def test_a_draft_of_two_origins_is_lossless_too(rule, problem):
    p, q, stops, rng = problem
    certain = [rng.random(len(t)) < 0.5 for t in q]
    q = [np.where(at[:, None], one_hot(rng, *t.shape), t) for t, at in zip(q, certain, strict=True)]
    with jax.enable_x64(True):
        emitted = emitted_joint(p, q, stops, rule=rule, certain=certain)
        np.testing.assert_allclose(emitted, target_joint(p), rtol=0, atol=TOLERANCE)
        reported = emitted_joint(p, q, stops, rule=rule)
        np.testing.assert_allclose(reported, emitted, rtol=0, atol=TOLERANCE)


@settings(max_examples=100)
@given(problems(), st.sampled_from(["token", "block"]), st.booleans())
def test_greedy_rows_emit_the_targets_argmax_under_every_rule(problem, rule, deterministic):
    p, q, stops, rng = problem
    p = [one_hot(rng, *t.shape) for t in p]
    q = [one_hot(rng, *t.shape) for t in q]
    with jax.enable_x64(True):
        emitted = emitted_joint(p, q, stops, rule=rule, deterministic=deterministic)
        np.testing.assert_array_equal(emitted, target_joint(p))


@pytest.mark.parametrize("wrong", ["unclamped", "wrong row", "argmax draft"])
def test_the_enumeration_notices_a_wrong_rule(wrong, monkeypatch):
    """The proof would be worth nothing if a broken rule passed it."""
    rng = np.random.default_rng(0)
    p = [table(rng, 3**c, 3, zeros=False) for c in range(3)]
    q = [table(rng, 3**c, 3, zeros=False) for c in range(2)]
    right = RULES["token"]

    def next_token_probs(p, draft, n):
        if wrong == "wrong row":
            return right.next_token_probs(jnp.roll(p, 1, axis=0), draft, n)
        q = draft.probs
        residual = p[n] - q[jnp.minimum(n, q.shape[0] - 1)] if q.shape[0] else p[n]
        return jnp.where(n < draft.length, residual / jnp.abs(residual).sum(), p[n])

    if wrong == "argmax draft":  # drafts its likeliest token but reports a softmax q
        drawn = [np.eye(3)[t.argmax(1)] for t in q]
        acceptance = lambda p, draft: right.acceptance(p, draft._replace(probs=None)) * 1.2  # noqa: E731
        rule, q = right._replace(acceptance=acceptance), drawn
    else:
        rule = right._replace(next_token_probs=next_token_probs)
    monkeypatch.setitem(RULES, wrong, rule)
    with jax.enable_x64(True):
        difference = emitted_joint(p, q, [np.zeros(3**c, bool) for c in range(2)], rule=wrong)
        assert np.abs(difference - target_joint(p)).max() > 1e-3


def _unclamped(p, draft):
    """The product of p / q as it runs, without the bound of 1 at each step."""
    places = jnp.arange(draft.tokens.shape[0], dtype=jnp.int32)
    ratios = p[places, draft.tokens] / draft.q_tokens(p)
    return jnp.concatenate([jnp.ones((1,), p.dtype), jnp.cumprod(ratios)])


BLOCK = RULES["block"]
WRONG_BLOCKS = {
    "running product not clamped": (BLOCK, _unclamped),
    "product clamped at the end only": (BLOCK, lambda *row: jnp.minimum(_unclamped(*row), 1.0)),
    "ends at the first failure": (BLOCK._replace(accepted=num_leading), verify.joint_acceptance),
    "ends at the first success": (
        BLOCK._replace(
            accepted=lambda kept: jnp.where(kept.any(), num_leading(~kept) + 1, jnp.int32(0))
        ),
        verify.joint_acceptance,
    ),
    "residual of the token rule": (
        BLOCK._replace(next_token_probs=RULES["token"].next_token_probs),
        verify.joint_acceptance,
    ),
}
"""Ports of block verification that were shipped elsewhere, or nearly."""


@pytest.mark.parametrize("wrong", WRONG_BLOCKS)
def test_the_enumeration_notices_a_wrong_port_of_block_verification(wrong, monkeypatch):
    rng = np.random.default_rng(0)
    p = [table(rng, 3**c, 3, zeros=False) for c in range(4)]
    q = [table(rng, 3**c, 3, zeros=False) for c in range(3)]
    rule, joint = WRONG_BLOCKS[wrong]
    monkeypatch.setitem(RULES, wrong, rule)
    monkeypatch.setattr(verify, "joint_acceptance", joint)
    with jax.enable_x64(True):
        emitted = emitted_joint(p, q, [np.zeros(3**c, bool) for c in range(3)], rule=wrong)
    # NaN is noticed as well.
    assert not np.abs(emitted - target_joint(p)).max() < 1e-4


accepted = jax.jit(accepted_length, static_argnums=0)


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.3, 0.999]), st.sampled_from([0.0, 0.3, 0.5, 1.0])),
        max_size=6,
    ),
    st.integers(0, 6),
)
def test_a_prefix_ends_at_the_first_coin_that_fails_or_the_last_that_does_not(pairs, length):
    length = min(length, len(pairs))
    expected = 0
    while expected < length and pairs[expected][0] < pairs[expected][1]:
        expected += 1
    # Coins past the draft's length count for nothing, those that would be kept included.
    uniforms, acceptance = np.array([*pairs, *[(0.0, 1.0)] * (6 - len(pairs))], np.float32).T
    given = (uniforms, acceptance, np.int32(length))
    assert int(accepted(RULES["token"], *given)) == expected
    kept = [i + 1 for i, (uniform, chance) in enumerate(pairs[:length]) if uniform < chance]
    assert int(accepted(RULES["block"], *given)) == max(kept, default=0)
