"""Several drafts of a row: the joint distribution of what is emitted is the target's own.

As in `test_lossless`, in float64 and by enumeration: every set of drafts with its probability,
every outcome of the coins, by the very function that the loop follows.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_jax.decoding import multi_draft
from spec_jax.decoding.multi_draft import follow
from spec_jax.decoding.verification import RowDraft
from spec_jax.decoding.verify import verify
from spec_jax.drafters.base import Draft
from tests.decoding.test_lossless import TOLERANCE, table, target_joint
from tests.often import often
from tests.sampling.test_draws import LEAST_P_VALUE, _p_value

DRAWS = 1_000_000


@functools.partial(jax.jit, static_argnames="label")
def every_path(p, tokens, q, lengths, is_certain=None, *, label="right"):
    """[rows, coins]: the probability of each outcome of the coins, and the path it leads to.

    `label` keeps the programs of wrong rules apart.
    """
    steps, drafts = tokens.shape[1:]
    coins = itertools.product([False, True], repeat=steps * drafts)
    coins = jnp.asarray(list(coins), bool).reshape(-1, steps, drafts)

    def one(p, draft, coins):
        # A uniform below or above every probability is a coin that fell one way or the other.
        path = follow(p, draft, drafts, jnp.where(coins, -1.0, 2.0).reshape(-1))
        heads = jnp.where(coins, path.acceptance, 1.0 - path.acceptance)
        return jnp.where(jnp.isnan(path.acceptance), 0.5, heads).prod(), path

    over_coins = jax.vmap(one, (None, None, 0))
    rows = RowDraft(tokens.reshape(len(tokens), -1), q, is_certain, lengths)
    return jax.vmap(over_coins, (0, 0, None))(p, rows, coins)


class Independent:
    """Drafts drawn from q[c], [V**c, V], after each context of c tokens.

    Args:
      q: the draft model.
      drafts: how many.
      missing: missing[c], bool [V**c]: at these contexts a draft ends (-1).
      early: early[s], bool [V**(s * drafts)]: whether, seeing the first s tokens of all drafts,
        the drafter goes no further.
    """

    def __init__(self, q, drafts, missing, early):
        self.q, self.drafts, self.missing, self.early = q, drafts, missing, early

    def __call__(self, c, context, steps):
        """Yields (probability, tokens [steps, drafts], q [steps * drafts, V], length)."""
        vocab = self.q[0].shape[1]
        for flat in itertools.product(range(vocab), repeat=steps * self.drafts):
            tokens = np.array(flat, np.int32).reshape(steps, self.drafts)
            chance, q, length, going = 1.0, [], 0, True
            ended = np.zeros(self.drafts, bool)
            at = np.full(self.drafts, context)
            seen = 0
            shown = tokens.copy()
            for s in range(steps):
                going = going and not self.early[s][seen]
                length += going
                for n in range(self.drafts):
                    dist = self.q[c + s][at[n]]
                    q.append(dist)
                    chance *= dist[tokens[s, n]]
                    ended[n] |= self.missing[c + s][at[n]]
                    at[n] = at[n] * vocab + tokens[s, n]
                    seen = seen * vocab + tokens[s, n]
                shown[s, ended] = -1
            if chance > 0:
                yield chance, shown, np.array(q), length


class Lookup:
    """Drafts that are a function of the context, as lookups are; they report no q."""

    def __init__(self, rng, vocab, drafts):
        self.rng, self.vocab, self.drafts = rng, vocab, drafts
        self.known = {}

    def __call__(self, c, context, steps):
        if (c, context) not in self.known:
            tokens = self.rng.integers(-1, self.vocab, (steps, self.drafts)).astype(np.int32)
            ended = np.logical_or.accumulate(tokens < 0, axis=0)
            length = int(self.rng.integers(0, steps + 1))
            self.known[c, context] = (np.where(ended, -1, tokens), length)
        tokens, length = self.known[c, context]
        yield 1.0, tokens, None, length


class Mixed:
    """Drafts drawn from q[c], of which some tokens are looked up: their q is one-hot.

    Looked-up tokens depend on the context and the number of the draft.
    """

    def __init__(self, rng, q, drafts):
        vocab = q[0].shape[1]
        self.looked_up = [
            np.where(rng.random((len(rows), drafts)) < 0.5, rng.integers(vocab, size=drafts), -1)
            for rows in q
        ]
        self.q, self.drafts = q, drafts

    def __call__(self, c, context, steps):
        vocab = self.q[0].shape[1]
        for flat in itertools.product(range(vocab), repeat=steps * self.drafts):
            tokens = np.array(flat, np.int32).reshape(steps, self.drafts)
            at, probability = np.full(self.drafts, context), 1.0
            q, is_certain = [], []
            for s in range(steps):
                for n in range(self.drafts):
                    known = self.looked_up[c + s][at[n], n]
                    row = self.q[c + s][at[n]]
                    is_certain.append(known >= 0)
                    q.append(np.full(vocab, np.nan) if known >= 0 else row)
                    probability *= float(tokens[s, n] == known) if known >= 0 else row[tokens[s, n]]
                at = at * vocab + tokens[s]
            if probability:
                yield probability, tokens, (np.stack(q), np.array(is_certain)), steps


def emitted_joint(p, drafter, *, label="right"):
    """The joint distribution [V] * (K + 1) of the first K + 1 tokens that rounds emit."""
    vocab, horizon = p[0].shape[1], len(p)
    joint = [np.ones((vocab**horizon, 1))]
    for c in reversed(range(horizon)):
        steps = horizon - 1 - c
        here = np.zeros((vocab**c, *(vocab,) * (steps + 1)))
        if steps == 0:
            joint.insert(0, p[c].reshape(vocab**c, -1))
            continue
        rows = [(x, *each) for x in range(vocab**c) for each in drafter(c, x, steps)]
        contexts, chances, tokens, q, lengths = (list(each) for each in zip(*rows, strict=True))
        tokens, is_certain = np.stack(tokens), None
        if isinstance(q[0], tuple):
            q, is_certain = (np.stack(each) for each in zip(*q, strict=True))
        drafts = tokens.shape[2]
        scored = [p[c][contexts][:, None]]
        at = np.repeat(np.array(contexts)[:, None], drafts, 1)
        for s in range(steps):
            at = at * vocab + np.maximum(tokens[:, s], 0)
            scored.append(p[c + s + 1][at])
        weight, path = every_path(
            jnp.asarray(np.concatenate(scored, 1)),
            jnp.asarray(tokens),
            None if q[0] is None else jnp.asarray(np.stack(q)),
            jnp.asarray(lengths, jnp.int32),
            is_certain if is_certain is None else jnp.asarray(is_certain),
            label=label,
        )
        assert path.next_token_probs.dtype == jnp.float64
        weight = np.asarray(weight) * np.array(chances)[:, None]
        accepted, chosen = np.asarray(path.accepted), np.asarray(path.draft_index)
        flat = here.reshape(-1)
        for n in range(steps + 1):
            row, coin = np.nonzero((accepted == n) & (weight > 0))
            after = np.array(contexts)[row]
            for s in range(n):
                after = after * vocab + tokens[row, s, chosen[row, coin]]
            last = np.asarray(path.next_token_probs)[row, coin]  # [hits, V]
            rest = joint[n].reshape(-1, vocab, vocab ** (steps - n))[after]
            mass = weight[row, coin][:, None, None] * last[:, :, None] * rest
            size = vocab ** (steps + 1 - n)
            np.add.at(flat, after[:, None] * size + np.arange(size), mass.reshape(-1, size))
        joint.insert(0, flat.reshape(vocab**c, -1))
    return joint[0].reshape((vocab,) * horizon)


@st.composite
def problems(draw):
    vocab, drafts, steps = draw(
        st.sampled_from([(2, 2, 2), (2, 3, 2), (3, 2, 2), (3, 3, 1), (4, 2, 1), (4, 3, 1)])
    )
    kind = draw(st.sampled_from(["any", "zeros", "equal", "disjoint"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    zeros = kind == "zeros"
    p = [table(rng, vocab**c, vocab, zeros=zeros) for c in range(steps + 1)]
    q = [table(rng, vocab**c, vocab, zeros=zeros) for c in range(steps)]
    if kind == "equal":
        q = p[:-1]
    if kind == "disjoint":
        side = np.arange(vocab) < vocab // 2
        p = [t * side / (t * side).sum(1, keepdims=True) for t in p]
        q = [t * ~side / (t * ~side).sum(1, keepdims=True) for t in q]
    share = draw(st.sampled_from([0.0, 0.3]))
    missing = [rng.random(vocab**c) < share for c in range(steps)]
    early = [rng.random(vocab ** (s * drafts)) < share for s in range(steps)]
    return p, q, drafts, missing, early, rng


@pytest.mark.slow
@settings(max_examples=60)
@given(problem=problems())
def test_independent_drafts_emit_the_targets_joint_distribution(problem):
    p, q, drafts, missing, early, _ = problem
    with jax.enable_x64(True):
        emitted = emitted_joint(p, Independent(q, drafts, missing, early))
        np.testing.assert_allclose(emitted, target_joint(p), rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@settings(max_examples=60)
@given(problem=problems())
def test_drafts_that_are_looked_up_do_so_too(problem):
    p, _, drafts, _, _, rng = problem
    with jax.enable_x64(True):
        emitted = emitted_joint(p, Lookup(rng, p[0].shape[1], drafts))
        np.testing.assert_allclose(emitted, target_joint(p), rtol=0, atol=TOLERANCE)


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.integers(1, 2))
def test_drafts_of_two_origins_emit_the_targets_joint_distribution(seed, steps):
    rng = np.random.default_rng(seed)
    p = [table(rng, 3**c, 3, zeros=False) for c in range(steps + 1)]
    q = [table(rng, 3**c, 3, zeros=False) for c in range(steps)]
    with jax.enable_x64(True):
        emitted = emitted_joint(p, Mixed(rng, q, 2))
        np.testing.assert_allclose(emitted, target_joint(p), rtol=0, atol=TOLERANCE)


def plain_problem(vocab=3, drafts=2, steps=2):
    rng = np.random.default_rng(3)
    p = [table(rng, vocab**c, vocab, zeros=False) for c in range(steps + 1)]
    q = [table(rng, vocab**c, vocab, zeros=False) for c in range(steps)]
    never = [np.zeros(vocab**c, bool) for c in range(steps)]
    early = [np.zeros(vocab ** (s * drafts), bool) for s in range(steps)]
    return p, q, drafts, never, early


WRONG = {
    # A second candidate is judged by p again, as if the first had not been rejected.
    "residual forgotten": ("residual", lambda p, q: p),
    "residual not normalised": ("residual", lambda p, q: jnp.maximum(p - q, 0.0)),
    # The node of another draft's token, whose context was not accepted.
    "another draft's node": ("node", lambda step, draft_index, drafts: 1 + step * drafts),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_enumeration_notices_a_wrong_rule(wrong, monkeypatch):
    name, function = WRONG[wrong]
    monkeypatch.setattr(multi_draft, name, function)
    p, q, drafts, missing, early = plain_problem()
    with jax.enable_x64(True):
        emitted = emitted_joint(p, Independent(q, drafts, missing, early), label=wrong)
    assert np.abs(emitted - target_joint(p)).max() > 1e-3


def test_the_best_of_several_drafts_is_kept_more_often_than_one():
    """What they are for: with one draft the same code accepts less."""
    p, q, _, missing, _ = plain_problem()
    chances = []
    for drafts in (1, 2, 3):
        early = [np.zeros(3**drafts, bool)]
        rows = list(Independent(q[:1], drafts, missing, early)(0, 0, 1))
        with jax.enable_x64(True):
            weight, path = every_path(
                jnp.asarray(np.broadcast_to(p[0][:, None], (len(rows), 1 + drafts, 3))),
                jnp.asarray(np.stack([tokens for _, tokens, _, _ in rows])),
                jnp.asarray(np.stack([q for _, _, q, _ in rows])),
                jnp.ones(len(rows), jnp.int32),
            )
            kept = (np.asarray(weight) * np.asarray(path.accepted)).sum(1)
        chances.append(sum(row[0] * each for row, each in zip(rows, kept, strict=True)))
    assert chances[0] == pytest.approx(np.minimum(p[0], q[0]).sum())
    assert chances[0] + 0.02 < chances[1] < chances[2]


@functools.partial(jax.jit, static_argnames=("count", "label"))
def _rounds(key, p, q, *, count, label):
    """Two drafts of two tokens for each of many rows, verified by the loop's own function."""
    keys = jax.random.split(key, 3)
    first = jax.random.categorical(keys[0], jnp.log(q[0][0]), shape=(count, 2)).astype(jnp.int32)
    second = jax.random.categorical(keys[1], jnp.log(q[1][first])).astype(jnp.int32)
    tokens = jnp.concatenate([first, second], 1)
    vocab = p[0].shape[1]
    places = [
        jnp.broadcast_to(p[0], (count, vocab))[:, None],
        p[1][first],
        p[2][first * vocab + second],
    ]
    probs = jnp.concatenate([jnp.broadcast_to(q[0][:, None], (count, 2, vocab)), q[1][first]], 1)
    # A row goes no further where its first draft says token 0: the length depends on the drafts.
    lengths = jnp.where(first[:, 0] == 0, 1, 2).astype(jnp.int32)
    draft = Draft(tokens, probs, lengths, num_drafts=2)
    verify_keys = jax.random.split(keys[2], count)
    verdict = verify("token", jnp.concatenate(places, 1), draft, verify_keys)
    return tokens, verdict


def emitted_counts(p, q, label):
    """Counts of the first three tokens; what a round left out the target itself adds."""
    vocab = p[0].shape[1]
    tables = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (p, q))
    tokens, verdict = jax.tree.map(
        np.asarray, _rounds(jax.random.key(5), *tables, count=DRAWS, label=label)
    )
    rng = np.random.default_rng(6)
    context = np.zeros(DRAWS, int)
    for i in range(3):
        uniforms = rng.random((DRAWS, 1))
        own = (p[i][context].cumsum(1) < uniforms).sum(1).clip(max=vocab - 1)
        drafted = tokens[np.arange(DRAWS), np.minimum(i, 1) * 2 + verdict.draft_index]
        token = np.where(i < verdict.accepted, drafted, own)
        token = np.where(i == verdict.accepted, verdict.token, token)
        context = context * vocab + token
    return np.bincount(context, minlength=vocab**3)


def test_a_million_draws_emit_the_targets_joint_distribution():
    p, q, *_ = plain_problem(vocab=4)
    assert _p_value(emitted_counts(p, q, "right"), target_joint(p)) > LEAST_P_VALUE


@pytest.mark.slow
@pytest.mark.parametrize("wrong", often(WRONG, [*WRONG][:1]))
def test_a_million_draws_notice_a_wrong_rule(wrong, monkeypatch):
    monkeypatch.setattr(multi_draft, *WRONG[wrong])
    p, q, *_ = plain_problem(vocab=4)
    assert _p_value(emitted_counts(p, q, wrong), target_joint(p)) < LEAST_P_VALUE
