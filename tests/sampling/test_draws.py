"""A million draws on eight tokens: the random numbers, not only the formulas, are lossless."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from spec_jax.decoding.verify import verify
from spec_jax.drafters.base import Draft
from spec_jax.sampling.draw import argmax, draw, largest
from tests.often import often
from tests.quick import optimized_jit

DRAWS = 1_000_000
VOCAB = 8
LEAST_P_VALUE = 1e-6


def _p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square of counts against probabilities; zero if something impossible was drawn."""
    counts, expected = counts.ravel().astype(np.float64), expected.ravel() * counts.sum()
    if counts[expected == 0].any():
        return 0.0
    # Rare outcomes share a bin, and too few of them join the commonest outcome.
    label = np.where(expected >= 10, np.arange(expected.size), expected.size)
    if expected[label == expected.size].sum() < 10:
        label[label == expected.size] = expected.argmax()
    counts, expected = np.bincount(label, counts), np.bincount(label, expected)
    counts, expected = counts[expected > 0], expected[expected > 0]
    return float(stats.chisquare(counts, expected).pvalue) if len(counts) > 1 else 1.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
@pytest.mark.parametrize("shape", [(7,), (3, 1), (2, 5, 131_072)])
def test_an_argmax_is_that_of_numpy(dtype, shape):
    """Ties, too: of a few values over a vocabulary; and NaN and infinities where there are any."""
    rng = np.random.default_rng(len(shape))
    values = rng.integers(-3, 4, shape).astype(np.float32)
    floats = dtype in ("float32", "bfloat16")
    if floats:
        values[values == 2] = np.inf
        values[values == -3] = -np.inf
    x = jnp.asarray(values).astype(dtype)
    assert x.dtype == dtype
    if floats:
        np.testing.assert_array_equal(jax.jit(largest)(x), np.asarray(x).argmax(-1))
    np.testing.assert_array_equal(jax.jit(argmax)(x), np.asarray(x).argmax(-1))
    np.testing.assert_array_equal(argmax(jnp.full(shape, x.min())), np.zeros(shape[:-1]))
    if dtype == "float32":
        values[..., -1:] = np.nan
        np.testing.assert_array_equal(argmax(jnp.asarray(values)), values.argmax(-1))
        np.testing.assert_array_equal(argmax(-jnp.inf * jnp.ones(shape)), np.zeros(shape[:-1]))


def _peaked(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.dirichlet(np.full(VOCAB, 0.6), shape)


DISTRIBUTIONS = {
    "uniform": np.full(VOCAB, 1 / VOCAB),
    "random": _peaked(np.random.default_rng(0)),
    "zeros": np.array([0, 0.5, 0, 0.25, 0.2, 0, 0.05, 0]),
    "two tokens": np.array([0, 0, 0, 0.999, 0, 0, 0.001, 0]),
    "geometric": 0.25 ** np.arange(VOCAB) * 0.75 / (1 - 0.25**VOCAB),
    "one-hot": np.eye(VOCAB)[5],
}


def _draw_many(probs: np.ndarray, seed: int) -> np.ndarray:
    @optimized_jit
    def many(key, probs):
        rows = jnp.broadcast_to(probs, (DRAWS, VOCAB))
        return draw(jax.random.split(key, DRAWS), rows)

    return np.asarray(many(jax.random.key(seed), jnp.asarray(probs, jnp.float32)))


@pytest.mark.parametrize("name", often(DISTRIBUTIONS, [*DISTRIBUTIONS][::2]))
def test_a_million_draws_follow_the_distribution(name):
    counts = np.bincount(_draw_many(DISTRIBUTIONS[name], seed=1), minlength=VOCAB)
    assert counts.size == VOCAB
    assert _p_value(counts, DISTRIBUTIONS[name]) > LEAST_P_VALUE


def test_a_million_draws_tell_distributions_apart_that_differ_by_two_percent():
    counts = np.bincount(_draw_many(DISTRIBUTIONS["uniform"], seed=1), minlength=VOCAB)
    wrong = DISTRIBUTIONS["uniform"] * np.where(np.arange(VOCAB) % 2, 1.02, 0.98)
    assert _p_value(counts, wrong) < LEAST_P_VALUE


def test_a_token_of_probability_zero_is_never_drawn_however_small_the_rest():
    probs = np.array([0, 1e-30, 0, 0, 1e-30, 0, 0, 0])
    assert set(np.unique(_draw_many(probs, seed=2))) == {1, 4}


def test_a_certain_token_is_always_drawn():
    keys = jax.random.split(jax.random.key(0), VOCAB)
    assert jax.jit(draw)(keys, jnp.eye(VOCAB)).tolist() == list(range(VOCAB))


def test_a_row_draws_by_its_own_key_alone():
    probs = jnp.asarray(_peaked(np.random.default_rng(3), 6), jnp.float32)
    keys = jax.random.split(jax.random.key(4), 6)
    drawn = jax.jit(draw)
    together = drawn(keys, probs)
    apart = [drawn(keys[i : i + 1], probs[i : i + 1])[0] for i in range(6)]
    assert together.tolist() == [int(each) for each in apart]


# --------------------------------------------- propose, verify, emit: K = 2 with a sampled draft


@dataclasses.dataclass(frozen=True)
class Pair:
    """A target and a draft whose distributions depend on the tokens before.

    Attributes:
      p: the target's distributions at the three places: [V], [V, V] and [V, V, V].
      q: the draft's at its two places: [V] and [V, V].
      one_hot: the drafter is deterministic and reports no q.
      length: how many of the two drafted tokens are proposed.
      short_after: first tokens after which only they are proposed: a length that depends on the
        draft.
    """

    p: tuple[np.ndarray, np.ndarray, np.ndarray]
    q: tuple[np.ndarray, np.ndarray]
    one_hot: bool = False
    length: int = 2
    short_after: tuple[int, ...] = ()


def _only(p: np.ndarray, support: list[int]) -> np.ndarray:
    kept = np.where(np.isin(np.arange(VOCAB), support), p + 1e-3, 0)
    return kept / kept.sum(-1, keepdims=True)


def _pairs() -> dict[str, Pair]:
    rng = np.random.default_rng(7)
    p = (_peaked(rng), _peaked(rng, VOCAB), _peaked(rng, VOCAB, VOCAB))
    q = (_peaked(rng), _peaked(rng, VOCAB))
    near = (0.8 * p[0] + 0.2 * q[0], 0.8 * p[1] + 0.2 * q[1])
    low, high = [0, 1, 2, 3, 4], [3, 4, 5, 6, 7]
    certain = (np.eye(VOCAB)[p[0].argmax()], np.eye(VOCAB)[rng.integers(0, VOCAB, VOCAB)])
    impossible = (np.eye(VOCAB)[6], np.eye(VOCAB)[rng.integers(0, VOCAB, VOCAB)])
    greedy = tuple(np.eye(VOCAB)[each.argmax(-1)] for each in p)
    zeros_in_p = tuple(_only(each, low) for each in p)
    return {
        "unlike": Pair(p, q),
        "alike": Pair(p, near),
        "equal": Pair(p, (p[0], p[1])),
        "zeros in p": Pair(zeros_in_p, q),
        "zeros in q": Pair(p, (_only(q[0], high), _only(q[1], low))),
        "zeros in both": Pair(zeros_in_p, (_only(q[0], high), _only(q[1], high))),
        "disjoint": Pair(
            tuple(_only(each, [0, 1, 2]) for each in p),
            (_only(q[0], [3, 4, 5, 6, 7]), _only(q[1], [3, 4, 5])),
        ),
        "equal, then disjoint": Pair(
            (p[0], _only(p[1], [0, 1]), p[2]), (p[0], _only(q[1], [2, 3]))
        ),
        "deterministic": Pair(p, certain, one_hot=True),
        "deterministic, reported as one-hot": Pair(p, certain),
        "deterministic and impossible": Pair(zeros_in_p, impossible, one_hot=True),
        "greedy target": Pair(greedy, near),
        "one token proposed": Pair(p, q, length=1),
        "nothing proposed": Pair(p, q, length=0),
        "the draft decides how many": Pair(p, near, short_after=(0, 2, 3)),
        "a lookup decides how many": Pair(
            p, certain, one_hot=True, short_after=(int(p[0].argmax()),)
        ),
    }


PAIRS = _pairs()


def _float32(arrays):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), arrays)


@functools.partial(
    optimized_jit, static_argnames=("rule", "one_hot", "length", "short_after", "count")
)
def _rounds(key, p, q, rule: str, one_hot: bool, length: int, short_after: tuple, count: int):
    draft_keys, second_keys, verify_keys = (
        jax.random.split(each, count) for each in jax.random.split(key, 3)
    )
    q0 = jnp.broadcast_to(q[0], (count, VOCAB))
    first = draw(draft_keys, q0)
    q1 = q[1][first]
    second = draw(second_keys, q1)
    is_short = (first[:, None] == jnp.array((-1, *short_after), jnp.int32)[None]).any(1)
    draft = Draft(
        tokens=jnp.stack([first, second], 1),
        probs=None if one_hot else jnp.stack([q0, q1], 1),
        lengths=jnp.where(is_short, 1, length).astype(jnp.int32),
    )
    scored = jnp.stack([jnp.broadcast_to(p[0], (count, VOCAB)), p[1][first], p[2][first, second]])
    verdict = verify(rule, scored.swapaxes(0, 1), draft, verify_keys)
    return first, second, verdict


@functools.cache
def _outcomes(name: str, rule: str = "token") -> np.ndarray:
    """How often each outcome came in a million rounds, indexed as `_exact_outcomes`."""
    pair = PAIRS[name]
    counts = np.zeros((3, VOCAB, VOCAB, VOCAB), np.int64)
    for i in range(4):
        first, second, verdict = _rounds(
            jax.random.fold_in(jax.random.key(11), i),
            _float32(pair.p),
            _float32(pair.q),
            rule=rule,
            one_hot=pair.one_hot,
            length=pair.length,
            short_after=pair.short_after,
            count=DRAWS // 4,
        )
        assert verdict.valid.all()
        n = np.asarray(verdict.accepted)
        tokens = np.stack([np.asarray(first), np.asarray(second), np.zeros_like(n)], 1)
        tokens[np.arange(3) >= n[:, None]] = 0
        tokens[np.arange(n.size), n] = verdict.token
        index = np.ravel_multi_index((n, *tokens.T), counts.shape)
        counts += np.bincount(index, minlength=counts.size).reshape(counts.shape)
    assert counts.sum() == DRAWS
    return counts


RULED = [(name, "token") for name in PAIRS] + [
    (name, "block")
    for name in ("unlike", "alike", "zeros in both", "deterministic", "the draft decides how many")
]
"""Pairs and rules; `test_lossless` has the proof for all of them, and here are random numbers."""
SOME_RULED = [("the draft decides how many", "block")]


@pytest.mark.parametrize(("name", "rule"), often(RULED, SOME_RULED))
def test_the_first_emitted_token_follows_the_target(name, rule):
    counts = _outcomes(name, rule).sum((0, 2, 3))
    assert _p_value(counts, PAIRS[name].p[0]) > LEAST_P_VALUE


@pytest.mark.parametrize(("name", "rule"), often(RULED, SOME_RULED))
def test_the_first_two_emitted_tokens_follow_the_target(name, rule):
    p0, p1, _ = PAIRS[name].p
    outcomes = _outcomes(name, rule)
    pairs = outcomes[1:].sum((0, 3))
    # After a round that emitted one token, the next one comes from the target.
    rng = np.random.default_rng(5)
    pairs += np.stack([rng.multinomial(outcomes[0, x, 0, 0], p1[x]) for x in range(VOCAB)])
    assert _p_value(pairs, p0[:, None] * p1) > LEAST_P_VALUE


def _exact_outcomes(pair: Pair) -> np.ndarray:
    """Probability of every (tokens accepted, tokens emitted), as Chen et al. derive it.

    Indexed [accepted, first, second, third]; tokens not emitted have index 0.
    """
    (p0, p1, p2), (q0, q1) = pair.p, pair.q
    out = np.zeros((3, VOCAB, VOCAB, VOCAB))
    if pair.length == 0:
        out[0, :, 0, 0] = p0
        return out
    out[0, :, 0, 0] = np.maximum(p0 - q0, 0)
    kept = np.minimum(p0, q0)
    if pair.length == 1:
        out[1, :, :, 0] = kept[:, None] * p1
        return out
    out[1, :, :, 0] = kept[:, None] * np.maximum(p1 - q1, 0)
    out[2] = (kept[:, None] * np.minimum(p1, q1))[..., None] * p2
    for x in pair.short_after:
        out[1, x, :, 0], out[2, x] = kept[x] * p1[x], 0
    return out


@pytest.mark.parametrize(
    "name", often(PAIRS, [name for name, rule in SOME_RULED if rule == "token"])
)
def test_acceptances_and_the_tokens_after_them_are_jointly_exact(name):
    # A uniform shared by the acceptance and the token after it shows here and nowhere before.
    exact = _exact_outcomes(PAIRS[name])
    assert exact.sum() == pytest.approx(1)
    assert _p_value(_outcomes(name), exact) > LEAST_P_VALUE


@pytest.mark.slow
def test_block_verification_accepts_more_than_the_token_rule():
    """What it is for (arXiv 2403.10444, theorem 2); more than chance explains."""
    accepted = {
        rule: (_outcomes("unlike", rule).sum((1, 2, 3)) * np.arange(3)).sum()
        for rule in ("token", "block")
    }
    assert accepted["block"] > accepted["token"] + 6 * np.sqrt(DRAWS)


def test_the_joint_test_sees_a_target_that_is_one_percent_another():
    pair = PAIRS["unlike"]
    wrong = tuple(0.99 * each + 0.01 / VOCAB for each in pair.p)
    exact = _exact_outcomes(dataclasses.replace(pair, p=wrong))
    assert _p_value(_outcomes("unlike"), exact) < LEAST_P_VALUE
