"""Norms in native code, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spec_jax.kernels import native_calls

pytestmark = pytest.mark.native
EPS = 1e-5


def normed(x, weight, bias, centered, num_tokens=None):
    call = jax.jit(lambda *args: native_calls.norm(*args, eps=EPS, centered=centered))
    bias, num_tokens = (None if each is None else jnp.asarray(each) for each in (bias, num_tokens))
    return np.asarray(call(jnp.asarray(x), jnp.asarray(weight), bias, num_tokens))


@settings(max_examples=20)
@given(
    rows=st.integers(1, 40),
    size=st.integers(1, 700),
    centered=st.booleans(),
    biased=st.booleans(),
    scale=st.sampled_from([1e-3, 1, 1e8]),
)
@example(rows=1, size=1, centered=False, biased=False, scale=1)
@example(rows=300, size=576, centered=False, biased=False, scale=1)
@example(rows=9, size=577, centered=True, biased=True, scale=1)
def test_norms_agree_with_float64(rows, size, centered, biased, scale):
    random = np.random.default_rng(size)
    x = (scale * random.standard_normal((rows, size)) + scale * centered).astype(np.float32)
    weight, bias = random.standard_normal((2, size)).astype(np.float32)
    wide = x.astype(np.float64)
    wide -= wide.mean(1, keepdims=True) if centered else 0
    expected = wide / np.sqrt((wide**2).mean(1, keepdims=True) + EPS) * weight
    expected += bias if biased else 0
    computed = normed(x, weight, bias if biased else None, centered)
    tolerance = 1e-5 * (1 + np.abs(expected).max())
    np.testing.assert_allclose(computed, expected, rtol=0, atol=tolerance)
    alone = [normed(row[None], weight, bias if biased else None, centered)[0] for row in x[:3]]
    assert computed[:3].tobytes() == np.stack(alone).tobytes()


def test_a_nan_stays_in_its_row():
    x = np.ones((3, 20), np.float32)
    x[1, 19] = np.nan
    computed = normed(x, np.ones(20, np.float32), None, centered=False)
    assert np.isnan(computed[1]).all() and np.isfinite(computed[[0, 2]]).all()


def test_padding_is_skipped():
    x, weight = np.full((6, 20), np.nan, np.float32), np.ones(20, np.float32)
    real = [0, 3, 4]
    x[real] = np.arange(20)
    computed = normed(x, weight, None, False, np.array([1, 2], np.int32))
    assert np.array_equal(computed[real], normed(x[real], weight, None, False))


def test_sizes_must_match():
    with pytest.raises(Exception, match="spec_jax_norm: sizes do not match"):
        normed(np.ones((2, 20), np.float32), np.ones(19, np.float32), None, centered=False)


@pytest.mark.parametrize("centered", [False, True])
def test_the_norm_of_a_sum(centered):
    x, added = np.random.default_rng(0).standard_normal((2, 9, 577)).astype(np.float32)
    weight = np.linspace(0.5, 2, 577, dtype=np.float32)
    call = jax.jit(
        lambda *args: native_calls.norm_of_sum(*args, weight, None, eps=EPS, centered=centered)
    )
    total, out = call(x, added)
    assert np.array_equal(total, x + added)
    assert np.array_equal(out, normed(x + added, weight, None, centered))
    with pytest.raises(Exception, match="spec_jax_norm: sizes do not match"):
        call(x, added[:, :-1])
