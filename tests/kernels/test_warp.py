"""Logits to probabilities and to likeliest tokens in native code, against sorts in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spec_jax.kernels import native_calls
from spec_jax.sampling import probabilities
from spec_jax.sampling.probabilities import likeliest

pytestmark = pytest.mark.native
VOCAB = 131_072
run = jax.jit(native_calls.warp)
likeliest_and_confidence = jax.jit(native_calls.likeliest, static_argnames="with_confidence")


def run_likeliest(logits, num_tokens=None):
    tokens, confidence = likeliest_and_confidence(logits, num_tokens)
    assert confidence.shape == (0,)
    return tokens


def warped(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The probabilities of logits [rows, vocab], with parameters for all rows or for each."""
    parameters = [
        np.broadcast_to(np.asarray(each, dtype), len(logits))
        for each, dtype in (
            (temperature, np.float32),
            (top_k, np.int32),
            (top_p, np.float32),
            (min_p, np.float32),
        )
    ]
    return np.asarray(run(logits, *parameters))


def softmax(x):
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def expected(logits, temperature, top_k, top_p, min_p):
    """The same for one row, with a sort."""
    x = logits.astype(np.float64)
    if temperature == 0:
        return np.eye(1, x.size, np.argmax(x))[0]
    x = (x - x.max()) / temperature
    if 0 < top_k < x.size:
        x[x < np.sort(x)[-top_k]] = -np.inf
    if top_p < 1:
        weights = softmax(x)
        order = np.argsort(-x, kind="stable")
        above = np.cumsum(weights[order]) - weights[order]
        x[x < x[order][above < top_p].min()] = -np.inf
    weights = softmax(x)
    x[weights < min_p * weights.max()] = -np.inf
    return softmax(x)


def check(logits, *parameters):
    computed = warped(logits, *parameters)
    for row, one in zip(logits, computed, strict=True):
        wanted = expected(row, *parameters)
        np.testing.assert_array_equal(one > 0, wanted > 1e-37)
        np.testing.assert_allclose(one, wanted, rtol=3e-6, atol=1e-38)


@settings(max_examples=60)
@given(
    vocab=st.integers(1, 300),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 17, 400]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-3]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    scale=st.sampled_from([0.01, 1, 5]),
    seed=st.integers(0, 9),
)
@example(VOCAB, 0.8, 0, 0.95, 0.0, 3, 0)
@example(VOCAB, 1.0, 0, 1.0, 0.0, 3, 0)
@example(VOCAB, 1.0, 50, 0.9, 0.02, 1, 0)
@example(VOCAB, 1.5, 100_000, 0.99, 0.0, 0.01, 0)
@example(VOCAB, 1.5, 400, 0.5, 0.0, 5, 1)
@example(VOCAB, 0.3, 0, 0.999, 0.0, 5, 2)
@example(VOCAB, 2.5, 0, 1e-3, 0.0, 0.01, 3)
def test_probabilities_equal_float64(vocab, temperature, top_k, top_p, min_p, scale, seed):
    random = np.random.default_rng(seed)
    logits = (scale * random.standard_normal((3, vocab))).astype(np.float32)
    check(logits, temperature, top_k, np.float32(top_p), np.float32(min_p))


@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75, 0.9])
def test_equal_logits_at_the_cut_all_stay(top_p):
    """Numbers of few values, both zeros and masked ones; half of the sum is at one logit."""
    logits = np.array([[2, -0.0, 0.0, 2, 1, -np.inf, 1, -7, 0, 2]], np.float32)
    for top_k in range(11):
        check(logits, 1.0, top_k, top_p, 0.0)
    halves = np.log(np.array([[0.5, 0.25, 0.125, 0.125]], np.float32))
    kept = (warped(halves, top_p=top_p)[0] > 0).sum()
    assert kept in {0.25: (1,), 0.5: (1, 2), 0.75: (2, 4), 0.9: (4,)}[top_p]


@pytest.mark.parametrize("size", [40, 4000])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_row_without_a_distribution_is_zero(top_p, size):
    logits = np.random.default_rng(0).standard_normal((5, size)).astype(np.float32)
    logits[0, 39], logits[1], logits[2, 3] = np.nan, -np.inf, np.inf
    logits[3, ::2] = -np.inf
    computed = warped(logits, top_p=top_p)
    assert (computed[:3] == 0).all()
    np.testing.assert_allclose(computed[3:].sum(1), 1, rtol=1e-6)
    assert (computed[3, ::2] == 0).all()


def test_the_least_cut_keeps_the_likeliest():
    logits = np.random.default_rng(0).standard_normal((1, 500)).astype(np.float32)
    greedy = np.eye(1, 500, logits.argmax(), dtype=np.float32)
    for cut in ({"top_k": 1}, {"top_p": 1e-30}, {"min_p": 1.0}, {"temperature": 1e-30}):
        np.testing.assert_array_equal(warped(logits, **cut), greedy)


def test_a_row_does_not_depend_on_its_neighbours():
    random = np.random.default_rng(0)
    logits = random.standard_normal((8, 1000)).astype(np.float32)
    parameters = [
        random.choice([0, 0.5, 1], 8),
        random.choice([0, 5, 500], 8),
        random.choice([1, 0.9], 8),
        random.choice([0, 0.1], 8),
    ]
    together = warped(logits, *parameters)
    for row in range(8):
        alone = warped(logits[row : row + 1], *(each[row] for each in parameters))
        assert alone.tobytes() == together[row : row + 1].tobytes()


@pytest.mark.parametrize("short", range(4))
def test_sizes_must_match(short):
    parameters = [np.ones(1 if i == short else 2, np.float32) for i in range(4)]
    with pytest.raises(Exception, match="spec_jax_warp: sizes do not match"):
        run(np.ones((2, 20), np.float32), *parameters)


@pytest.mark.parametrize("vocab", [1, 40, VOCAB])
def test_the_likeliest_token_is_the_first_of_the_largest(vocab):
    random = np.random.default_rng(0)
    logits = random.integers(-3, 3, (6, vocab)).astype(np.float32)
    logits[2:] += random.standard_normal((4, vocab)).astype(np.float32)
    np.testing.assert_array_equal(run_likeliest(logits), logits.argmax(1))
    np.testing.assert_array_equal(likeliest(jnp.asarray(logits)[None])[0], logits.argmax(1))
    last = vocab - 1
    logits[0, last], logits[1], logits[2, last] = np.nan, -np.inf, np.inf
    np.testing.assert_array_equal(run_likeliest(logits), [-1, -1, -1, *logits[3:].argmax(1)])
    np.testing.assert_array_equal(run_likeliest(-np.inf * np.ones((1, vocab), np.float32)), [-1])


@pytest.mark.parametrize("vocab", [40, 1000, VOCAB])
def test_a_confidence_is_the_probability_in_float64(vocab, monkeypatch):
    scales = np.array([[1], [9], [80], [1], [1]], np.float32)
    logits = scales * np.random.default_rng(0).standard_normal((5, vocab)).astype(np.float32)
    logits[1, 1:], logits[2, ::3], logits[4] = -np.inf, -np.inf, -np.inf
    logits[3, -1] = np.nan
    wide = logits[:3].astype(np.float64)
    expected = np.append(1 / np.exp(wide - wide.max(1, keepdims=True)).sum(1), [0, 0])
    tokens, confidence = likeliest_and_confidence(logits, with_confidence=True)
    np.testing.assert_array_equal(tokens, run_likeliest(logits))
    np.testing.assert_allclose(confidence, expected, rtol=2e-6)
    for is_native in (True, False):
        monkeypatch.setattr(probabilities, "_is_native", lambda *_, is_native=is_native: is_native)
        tokens, confidence = probabilities.likeliest_with_confidence(jnp.asarray(logits))
        np.testing.assert_array_equal(tokens, run_likeliest(logits))
        np.testing.assert_allclose(confidence, expected, rtol=2e-5)


def test_padding_is_skipped():
    """Two batch rows of three positions; one is real in the first, and none in the second."""
    logits = np.random.default_rng(0).standard_normal((6, 500)).astype(np.float32)
    counts = np.array([1, 0], np.int32)
    np.testing.assert_array_equal(
        run_likeliest(logits, counts), [logits[0].argmax(), -1, -1, -1, -1, -1]
    )
    _, confidence = likeliest_and_confidence(logits, counts, with_confidence=True)
    assert confidence[0] > 0 and (confidence[1:] == 0).all()
    parameters = np.ones(6, np.float32), np.zeros(6, np.int32), np.ones(6, np.float32)
    probs = run(logits, *parameters, np.zeros(6, np.float32), counts)
    np.testing.assert_array_equal(probs[0], warped(logits[:1])[0])


def test_a_batch_must_divide_the_rows():
    with pytest.raises(Exception, match="spec_jax_likeliest: sizes do not match"):
        run_likeliest(np.ones((3, 20), np.float32), np.ones(2, np.int32))
