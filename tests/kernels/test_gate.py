"""Gates of MLPs in native code, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spec_jax.kernels import native_calls

pytestmark = pytest.mark.native


def gated(gate, up, activation, num_tokens=None):
    call = jax.jit(lambda *args: native_calls.gated(*args[:2], activation, *args[2:]))
    counts = () if num_tokens is None else (jnp.asarray(num_tokens, jnp.int32),)
    return np.asarray(call(jnp.asarray(gate), jnp.asarray(up), *counts))


def in_float64(gate, up, activation):
    x = gate.astype(np.float64)
    y = x if activation == "silu" else 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-y)) * up


@settings(max_examples=20)
@given(
    rows=st.integers(1, 40),
    size=st.integers(1, 700),
    activation=st.sampled_from(sorted(native_calls.GATES)),
    scale=st.sampled_from([1e-3, 1, 30]),
)
@example(rows=1, size=1, activation="silu", scale=1)
@example(rows=300, size=1536, activation="silu", scale=1)
@example(rows=9, size=8961, activation="gelu_tanh", scale=1)
def test_gates_agree_with_float64(rows, size, activation, scale):
    random = np.random.default_rng(size)
    gate, up = random.standard_normal((2, rows, size)).astype(np.float32)
    gate *= scale
    computed, expected = gated(gate, up, activation), in_float64(gate, up, activation)
    np.testing.assert_allclose(computed, expected, rtol=2e-6, atol=1e-6 * scale)
    alone = [gated(gate[i : i + 1], up[i : i + 1], activation)[0] for i in range(min(rows, 3))]
    assert computed[:3].tobytes() == np.stack(alone).tobytes()


@pytest.mark.parametrize("activation", sorted(native_calls.GATES))
def test_gates_of_extreme_numbers(activation):
    gate = np.array([[np.inf, -3e38, 3e38, -100, 0, -0.0, np.nan, 1]], np.float32)
    computed = gated(gate, np.ones_like(gate), activation)[0]
    assert computed[[0, 2]].tolist() == [np.inf, gate[0, 2]]
    assert np.abs(computed[[1, 3, 4, 5]]).max() < 1e-36
    assert np.isnan(computed[6])
    np.testing.assert_allclose(computed[7], in_float64(gate, 1.0, activation)[0, 7], rtol=1e-6)


def test_padding_is_skipped():
    gate, up = np.full((2, 6, 20), np.nan, np.float32)
    real = [0, 3, 4]
    gate[real], up[real] = 1, 2
    computed = gated(gate, up, "silu", [1, 2])
    assert np.array_equal(computed[real], gated(gate[real], up[real], "silu"))


def test_sizes_must_match():
    with pytest.raises(Exception, match="spec_jax_gate: sizes do not match"):
        gated(np.ones((2, 20), np.float32), np.ones((2, 19), np.float32), "silu")
