"""Draws in native code, against the races of `sampling.draw` and counts expected in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.kernels import native_calls
from spec_jax.sampling import draw as races
from spec_jax.sampling.probabilities import draw_tokens
from tests.sampling.test_draws import LEAST_P_VALUE, _p_value

pytestmark = pytest.mark.native
VOCAB = 131_072


def random_rows(rows, vocab, seed=0):
    """Rows with many zeros, as a cut leaves them, and rows without."""
    random = np.random.default_rng(seed)
    probs = random.dirichlet(np.full(vocab, 0.02), rows).astype(np.float32)
    probs[::2] *= random.random((len(probs[::2]), vocab)) < 0.05
    probs[::2, random.integers(vocab)] += 0.1
    return probs


@pytest.mark.parametrize("vocab", [1, 2, 300, 49_152, VOCAB, 151_936])
def test_tokens_are_those_of_the_races(vocab):
    probs = random_rows(40, vocab)
    keys = jax.random.split(jax.random.key(1), 40)
    found = np.asarray(jax.jit(draw_tokens)(keys[:, None], probs[:, None]))[:, 0]
    np.testing.assert_array_equal(found, jax.jit(races.draw)(keys, probs))
    assert (probs[np.arange(40), found] > 0).all()


def test_counts_are_what_float64_expects():
    """Of the tail too: a tenth of the sum is in tokens of a millionth each."""
    weights = np.full(VOCAB, 0.1 / (VOCAB - 8), np.float32)
    weights[:8] = 0.9 * np.array([0.4, 0.2, 0.1, 0.1, 0.1, 0.05, 0.03, 0.02])
    count = 40_000
    keys = jax.random.key_data(jax.random.split(jax.random.key(2), count)).reshape(-1, 40, 2)
    rows = jnp.broadcast_to(weights, (40, VOCAB))
    block = races.blocks(VOCAB)[1]
    call = jax.jit(lambda keys: native_calls.draw(keys, rows, block))
    tokens = np.concatenate([call(each) for each in keys])
    groups = np.minimum(np.arange(VOCAB), 8) + (np.arange(VOCAB) > VOCAB // 2)
    expected = np.bincount(groups, weights.astype(np.float64)) / weights.sum(dtype=np.float64)
    assert _p_value(np.bincount(groups[tokens], minlength=10), expected) > LEAST_P_VALUE


def test_rows_without_a_distribution_and_padding_give_nothing():
    probs = random_rows(6, 500).reshape(3, 2, 500)
    probs[0, 1] = 0
    keys = jax.random.split(jax.random.key(3), (3, 2))
    everything = np.asarray(jax.jit(draw_tokens)(keys, probs))
    assert everything[0, 1] == -1 and (np.delete(everything, 1) >= 0).all()
    counts = jnp.array([2, 0, 1], jnp.int32)
    some = jax.jit(lambda keys, probs: draw_tokens(keys, probs, num_tokens=counts))(keys, probs)
    expected = everything.copy()
    expected[1], expected[2, 1] = -1, -1
    np.testing.assert_array_equal(some, expected)


def test_a_row_does_not_depend_on_its_neighbours():
    probs, keys = random_rows(8, 3000), jax.random.split(jax.random.key(4), 8)
    call = jax.jit(draw_tokens)
    together = np.asarray(call(keys[:, None], probs[:, None]))
    for row in range(8):
        alone = call(keys[row : row + 1, None], probs[row : row + 1, None])
        assert alone[0, 0] == together[row, 0]


@pytest.mark.parametrize("shapes", [((3, 2), 0), ((2, 2), 3)])
def test_sizes_must_match(shapes):
    keys, batch = shapes
    counts = np.ones(batch, np.int32)
    with pytest.raises(Exception, match="spec_jax_draw: sizes do not match"):
        jax.jit(lambda k, p: native_calls.draw(k, p, 5, counts))(
            np.zeros(keys, np.uint32), np.ones((2, 20), np.float32)
        )
