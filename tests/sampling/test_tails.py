"""Rare tokens are drawn as often as float64 says: large vocabularies with heavy tails.

Each chi-square test errs with a probability of 1e-6, whatever the draw.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from spec_jax.decoding.verify import verify
from spec_jax.drafters.base import Draft
from spec_jax.planning.hlo import collectives
from spec_jax.sampling.draw import blocks, draw, uniform
from tests.often import often
from tests.quick import optimized_jit
from tests.sampling.test_draws import LEAST_P_VALUE, _p_value

VOCAB = 131_072


@functools.partial(optimized_jit, static_argnames="count")
def draws(key, weights, count):
    """Tokens of many rows of the same weights, 64 at a time."""
    rows = jnp.broadcast_to(weights, (64, *weights.shape))
    keys = jax.random.split(key, (count // 64, 64))
    return jax.lax.map(lambda keys: draw(keys, rows), keys).ravel()


def in_groups(tokens: np.ndarray, groups: np.ndarray, weights: np.ndarray) -> float:
    """The p-value of the counts of groups of tokens, expected in float64."""
    weights = weights.astype(np.float64)
    expected = np.bincount(groups, weights / weights.sum())
    return _p_value(np.bincount(groups[tokens], minlength=len(expected)), expected)


def decades(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights of 1e-8 to 0.1 in random order, and the decade of each."""
    rng = np.random.default_rng(seed)
    decade = np.repeat([1, 2, 3, 4, 5, 6, 7, 8], [3, 15, 90, 800, 8000, 40_000, 42_164, 40_000])
    weights = rng.uniform(1, 10, VOCAB) * 10.0**-decade
    order = rng.permutation(VOCAB)
    return (weights[order] / weights.sum()).astype(np.float32), decade[order]


def test_a_heavy_tail_of_tiny_tokens_is_drawn():
    """Noise of 2^-23's grain would draw 1 token of the tail where 134 are due."""
    weights = np.full(VOCAB, 0.00655 / (VOCAB - 1), np.float32)
    weights[77_777] = 1 - 0.00655
    tokens = np.asarray(draws(jax.random.key(0), jnp.asarray(weights), 20_480))
    is_tail = (np.arange(VOCAB) != 77_777).astype(int)
    assert in_groups(tokens, is_tail, weights) > LEAST_P_VALUE


@pytest.mark.parametrize("scale", often([1.0, 1e-30, 1e30], [1.0]))
def test_every_decade_of_probability_is_drawn_as_often_as_it_says(scale):
    """Rows of any sum; the rarest decade of these 40,960 draws is due about 90 times."""
    weights, decade = decades(1)
    tokens = np.asarray(draws(jax.random.key(2), jnp.asarray(weights * np.float32(scale)), 40_960))
    assert in_groups(tokens, decade, weights) > LEAST_P_VALUE
    # Within and across blocks as well, whose sums are the first race's weights.
    size = blocks(VOCAB)[1]
    assert in_groups(tokens, np.arange(VOCAB) // size, weights) > LEAST_P_VALUE
    assert in_groups(tokens, np.arange(VOCAB) % size, weights) > LEAST_P_VALUE


@pytest.mark.slow
def test_a_residual_of_two_heavy_tails_is_drawn():
    """Of a draft that is refused nine times in ten, what follows is max(p - q, 0)."""
    p, decade = decades(1)
    q = np.roll(p, 1)
    batch = 256

    @optimized_jit
    def rounds(keys):
        def one(keys):
            draft = Draft(
                tokens=jnp.full((batch, 1), int(np.argmax(q / (p + 1e-30))), jnp.int32),
                probs=jnp.broadcast_to(jnp.asarray(q), (batch, 1, VOCAB)),
                lengths=jnp.ones((batch,), jnp.int32),
            )
            verdict = verify(
                "token", jnp.broadcast_to(jnp.asarray(p), (batch, 2, VOCAB)), draft, keys
            )
            return verdict.accepted, verdict.token

        return jax.lax.map(one, keys)

    keys = jax.random.split(jax.random.key(3), (60, batch))
    accepted, token = (np.asarray(each).ravel() for each in rounds(keys))
    residual = np.maximum(p.astype(np.float64) - q, 0)
    assert (accepted == 0).sum() > 10_000
    assert in_groups(token[accepted == 0], decade, residual) > LEAST_P_VALUE


def test_uniforms_have_every_exponent_and_every_mantissa():
    numbers = np.asarray(
        optimized_jit(lambda key: uniform(key, (2**22,), jnp.float32))(jax.random.key(4))
    )
    assert (numbers > 0).all() and (numbers < 1).all()
    mantissa, exponent = np.frexp(numbers.astype(np.float64))
    exponents = np.bincount(-exponent, minlength=40)[:40]
    assert _p_value(exponents, 0.5 ** np.arange(1, 41)) > LEAST_P_VALUE
    # Numbers below 2^-8 too have mantissas of 24 bits.
    for some in (mantissa, mantissa[exponent < -8]):
        bits = (some * 2**24).astype(np.int64) - 2**23
        for shift in (0, 15):
            counts = np.bincount((bits >> shift) % 256, minlength=256)
            assert _p_value(counts, np.full(256, 1 / 256)) > LEAST_P_VALUE


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_random_bits_become_the_float_that_they_say(dtype, monkeypatch):
    """To the ends of the range: never 0, never 1, and the exponent from leading zeros alone."""
    bits = np.finfo(dtype).bits
    every, top, low = (1 << bits) - 1, 1 << (bits - 1), 1
    nmant = np.finfo(dtype).nmant
    cases = [
        ([every, every, 0, 0, 0], 1 - 2.0 ** -(nmant + 1)),
        ([0, top, 0, 0, 0], 0.5),
        ([top, top >> 3, 0, 0, 0], 1.5 * 2.0**-4),
        ([every >> (nmant + 1), low, every, 0, 0], 2.0**-bits),
        ([top, 0, top, 0, 0], 1.5 * 2.0 ** -(bits + 1)),
        ([0, 0, 0, top >> 5, every], 2.0 ** -(2 * bits + 6)),
        ([0, 0, 0, 0, 0], max(2.0 ** -(4 * bits + 1), float(np.finfo(dtype).tiny))),
    ]
    words = np.array([case for case, _ in cases], np.uint64).astype(f"uint{bits}")
    with jax.enable_x64(dtype == np.float64):
        monkeypatch.setattr(jax.random, "bits", lambda key, shape, dtype: jnp.asarray(words))
        numbers = uniform(jax.random.key(0), (len(cases),), dtype)
    assert numbers.dtype == dtype
    assert numbers.tolist() == [number for _, number in cases]


@pytest.mark.parametrize("rest", [pytest.param((), marks=pytest.mark.slow), (2,)])
def test_fewer_uniforms_begin_as_more_do(rest):
    """How many positions a row verifies depends on its neighbours' drafts."""
    key = jax.random.key(11)
    counted = jax.jit(lambda key: [uniform(key, (n, *rest), jnp.float32) for n in range(1, 10)])
    *fewer, many = map(np.asarray, counted(key))
    for each in fewer:
        assert (each == many[: len(each)]).all()


ZERO_KEY = 3_353_848
"""A seed by whose key `jax.random.uniform` says 0.0 where verification used to ask it."""


@pytest.mark.parametrize("drafts", [1, 2])
def test_an_acceptance_of_a_billionth_is_no_ten_millionth(drafts):
    keys = jax.random.key(ZERO_KEY)[None]
    used = jax.random.split(keys[0])[0]
    assert jax.random.uniform(used, (1, drafts))[0, 0] == 0
    p = jnp.broadcast_to(jnp.asarray([1e-9, 1.0]), (1, 1 + drafts, 2))
    draft = Draft(
        tokens=jnp.zeros((1, drafts), jnp.int32),
        probs=jnp.broadcast_to(jnp.asarray([1.0, 0.0]), (1, drafts, 2)),
        lengths=jnp.ones((1,), jnp.int32),
        num_drafts=drafts,
    )
    verdict = jax.jit(functools.partial(verify, "token"))(p, draft, keys)
    assert (int(verdict.accepted[0]), int(verdict.token[0])) == (0, 1)


SIZES = list(itertools.product((97, 4096, 50_261), (np.float32, np.float64)))


@pytest.mark.parametrize(
    ("vocab", "dtype"), often(SIZES, [(97, np.float64), (4096, np.float32), (50_261, np.float32)])
)
def test_what_is_drawn_is_possible_whatever_the_vocabulary_and_the_scale(dtype, vocab):
    """Padded vocabularies too; a row of zeros draws some token of the vocabulary."""
    rng, count = np.random.default_rng(5), 48
    tiny = float(np.finfo(dtype).tiny)
    possible = np.sort(rng.choice(vocab, 3, replace=False))
    rows = np.zeros((count, vocab), dtype)
    rows[:, possible] = rng.choice([2 * tiny, 1e-30, 1.0], (count, 3))
    rows[:3], rows[3] = 0, tiny
    rows[1, vocab - 1], rows[2, vocab - 1] = 1, 1.1 * tiny
    with jax.enable_x64(dtype == np.float64):
        keys = jax.random.split(jax.random.key(6), count)
        tokens = np.asarray(optimized_jit(draw)(keys, jnp.asarray(rows)))
    assert tokens.min() >= 0 and tokens.max() < vocab
    assert tokens[1] == tokens[2] == vocab - 1
    assert (rows[np.arange(count), tokens] > 0)[1:].all()
    # A token 1e30 times as likely as the others together is drawn.
    certain = rows.max(1) > 0.9 * rows.sum(1)
    certain[0] = False
    assert certain.sum() > 5 and (tokens == rows.argmax(1))[certain].all()


@pytest.mark.slow
def test_in_float64_as_well_decades_are_followed():
    weights, decade = decades(7)
    with jax.enable_x64(True):
        tokens = np.asarray(draws(jax.random.key(8), jnp.asarray(weights, jnp.float64), 25_600))
    assert in_groups(tokens, decade, weights) > LEAST_P_VALUE


@pytest.mark.parametrize("vocab", [8, 96, 32_000, 49_152, 128_256, 151_936, 262_144])
@pytest.mark.parametrize("shards", [2, 8])
def test_blocks_lie_whole_on_shards(vocab, shards):
    count, size = blocks(vocab)
    assert count * size == vocab and count % shards == 0
    assert count + size <= 16 * np.sqrt(vocab)


@pytest.mark.parametrize("vocab", [1, 2, 97, 50_261, 51_865, 50_258])
def test_blocks_hold_any_vocabulary(vocab):
    count, size = blocks(vocab)
    assert vocab <= count * size < vocab + size
    assert count + size <= 16 * np.sqrt(vocab) + 1


SPECS = [P(None, "model"), P("data", "model"), P("data", ("outer", "model"))]


@pytest.mark.parametrize(
    "spec", [*(pytest.param(s, marks=pytest.mark.slow) for s in SPECS[:2]), SPECS[2]]
)
def test_a_sharded_vocabulary_is_not_gathered(spec):
    """One block of it is, as a sum over the shards; and the tokens equal one device's."""
    mesh = jax.make_mesh((2, 2, 4), ("data", "outer", "model"), (AxisType.Auto,) * 3)
    vocab = 49_152
    _, size = blocks(vocab)
    weights = np.random.default_rng(9).dirichlet(np.full(vocab, 0.01), 4).astype(np.float32)
    keys = jax.random.split(jax.random.key(10), 4)
    rows = jax.device_put(jnp.asarray(weights), NamedSharding(mesh, spec))
    jitted = jax.jit(lambda keys, rows: draw(keys, rows))
    program = jitted.lower(keys, rows).compile()
    for each in collectives(program.as_text()):
        numbers = [
            int(n) for n in each.shape.replace("[", ",").replace("]", ",").split(",") if n.isdigit()
        ]
        assert np.prod(numbers, dtype=int) <= 4 * size, each
    assert program(keys, rows).tolist() == jax.jit(draw)(keys, weights).tolist()
