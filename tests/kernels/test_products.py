"""Products with weights of every form equal float64's, at every shape."""

import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spec_jax.kernels import (
    PackedWeight,
    Quantized,
    QuantizedWeight,
    columns,
    products,
    quantize,
    take_outputs,
)

FORMATS = ("float32", "bfloat16", "int8", "int4", "int8 in groups", "int4 of any range")


pytestmark = pytest.mark.native


def matrix(kind, inputs, outputs, seed=0):
    """A matrix [out, in] of a format, for `PackedWeight.of`."""
    random = np.random.default_rng(seed)
    weight = random.standard_normal((outputs, inputs)).astype(np.float32)
    if kind in ("int8", "int4"):
        return quantize(weight, 8 if kind == "int8" else 4)
    if kind == "int4 of any range":  # too wide for half precision
        return quantize(weight * 1e6, 4)
    if kind == "int8 in groups":
        groups = inputs // 16 if inputs % 16 == 0 else 1
        scales = random.uniform(0.1, 2, (outputs, groups)).astype(np.float32)
        minima = random.uniform(-9, 9, (outputs, groups)).astype(np.float32)
        values = random.integers(-128, 128, (outputs, inputs), np.int8)
        return Quantized(values, scales, minima, 8)
    return weight.astype(kind)


def in_full(weight):
    """The matrix that a weight stands for, in float64."""
    if isinstance(weight, Quantized):
        weight = weight.dequantize()
    return np.asarray(weight, np.float64)


def check(x, weight, found):
    """Within rounding of float32 sums: of the magnitude of all that is added."""
    rounds = not isinstance(weight, Quantized) and weight.dtype == ml_dtypes.bfloat16
    exact = (x.astype(ml_dtypes.bfloat16) if rounds else x).astype(np.float64)
    matrix = in_full(weight)
    magnitude = np.abs(exact) @ np.abs(matrix.T)
    minima = weight.simplified().minima if isinstance(weight, Quantized) else None
    if minima is not None:
        # A weight is the difference of two numbers that may both be larger.
        parts = np.abs(exact).reshape(len(x), minima.shape[1], -1).sum(2)
        magnitude += 2 * parts @ np.abs(minima.astype(np.float64).T)
    assert found.dtype == np.float32
    assert (np.abs(np.asarray(found) - exact @ matrix.T) <= 2e-6 * magnitude + 1e-37).all()


multiply = jax.jit(products)
in_one = jax.jit(lambda weight: weight.dequantize())


@pytest.mark.parametrize("kind", FORMATS)
@settings(max_examples=12)
@given(rows=st.integers(1, 300), inputs=st.integers(1, 200), outputs=st.integers(1, 100))
@example(rows=1, inputs=1, outputs=1)
@example(rows=1, inputs=576, outputs=49)
@example(rows=5, inputs=96, outputs=160)
@example(rows=8, inputs=96, outputs=33)
@example(rows=9, inputs=64, outputs=16)
@example(rows=12, inputs=64, outputs=17)
@example(rows=13, inputs=32, outputs=64)
@example(rows=300, inputs=1536, outputs=31)
def test_native_products_equal_float64(kind, rows, inputs, outputs):
    weight = matrix(kind, inputs, outputs)
    x = np.random.default_rng(1).standard_normal((rows, inputs)).astype(np.float32)
    check(x, weight, multiply(x, [PackedWeight.of(weight)])[0])


@pytest.mark.parametrize("kind", ["int8", "int4", "int8 in groups"])
@pytest.mark.parametrize("rows", [1, 5])
def test_products_by_xla_equal_float64(kind, rows):
    weight = matrix(kind, 96, 40)
    x = np.random.default_rng(1).standard_normal((rows, 96)).astype(np.float32)
    check(x, weight, multiply(x, [QuantizedWeight.of(weight, jnp.float32)])[0])


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("rows", [1, 40])
def test_several_weights_in_one_call(kind, rows):
    weights = [matrix(kind, 64, outputs, seed=outputs) for outputs in (48, 5, 130)]
    x = np.random.default_rng(1).standard_normal((2, rows, 64)).astype(np.float32)
    found = multiply(x, [PackedWeight.of(weight) for weight in weights])
    for weight, each in zip(weights, found, strict=True):
        assert each.shape == (2, rows, len(in_full(weight)))
        check(x.reshape(-1, 64), weight, each.reshape(2 * rows, -1))


def test_weights_of_different_formats_in_one_call():
    weights = [matrix(kind, 64, 20) for kind in FORMATS]
    x = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    found = multiply(x, [PackedWeight.of(weight) for weight in weights])
    for weight, each in zip(weights, found, strict=True):
        check(x, weight, each)


def for_xla(weight):
    return QuantizedWeight.of(weight, "float32")


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        *((PackedWeight.of, kind) for kind in FORMATS),
        *((for_xla, kind) for kind in FORMATS if kind.startswith("int")),
    ],
)
def test_the_numbers_of_a_weight_are_kept(form, kind):
    weight = matrix(kind, 80, 37)
    made, full = form(weight), in_full(weight).T.astype(np.float32)
    assert made.shape == (80, 37)
    np.testing.assert_array_equal(in_one(made), full)
    ids = np.array([[36, 0, 5], [17, 16, 15]])
    np.testing.assert_array_equal(jax.jit(columns)(made, ids), np.moveaxis(full[:, ids], 0, -1))
    for some in (jax.jit(take_outputs)(made, ids[0]), take_outputs(made, ids[0])):
        np.testing.assert_array_equal(in_one(some), full[:, ids[0]])


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("rows", [1, 6, 20])
def test_infinities_and_nan_pass_through(kind, rows):
    weight = matrix(kind, 64, 20)
    x = np.random.default_rng(1).standard_normal((rows, 64)).astype(np.float32)
    x[0, 3], x[-1, 5] = np.inf, np.nan
    found = np.asarray(multiply(x, [PackedWeight.of(weight)])[0])
    assert np.isnan(found[-1]).all()
    assert not np.isfinite(found[0]).any()
    assert np.isfinite(found[1:-1]).all()


def test_callers_in_many_threads():
    """Each waits for its own tasks in a pool that all share."""
    weights = [PackedWeight.of(matrix("float32", 256, 640, seed)) for seed in range(2)]
    x = np.random.default_rng(1).standard_normal((4, 256)).astype(np.float32)

    @jax.jit
    def chain(x, weights):
        for _ in range(20):
            x = products(products(x, weights)[0][:, :256], weights)[1][:, :256] / 100
        return x

    expected, wrong = np.asarray(chain(x, weights)), []

    def call():
        for _ in range(20):
            if not np.array_equal(chain(x, weights), expected):
                wrong.append(1)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


@pytest.mark.parametrize("bits", [8, 4])
def test_quantizing_rounds_to_the_nearest(bits):
    weight = np.random.default_rng(2).standard_normal((20, 96)).astype(np.float32)
    weight[3] = 0  # of no range
    made = quantize(weight, bits)
    step = np.repeat(made.scales.astype(np.float32), 96 // made.scales.shape[1], axis=1)
    # Half precision moves a group's ends by less than a twentieth of a step.
    assert (np.abs(made.dequantize() - weight) <= step * (0.5 if bits == 8 else 0.56) + 1e-7).all()
    assert (made.dequantize()[3] == 0).all()


def test_few_bits_take_few_bytes():
    def bits(weight):
        return 8 * sum(leaf.nbytes for leaf in jax.tree.leaves(weight)) / (256 * 512)

    weight = np.random.default_rng(2).standard_normal((512, 256)).astype(np.float32)
    assert bits(PackedWeight.of(weight)) == 32
    assert bits(PackedWeight.of(weight.astype(ml_dtypes.bfloat16))) == 16
    assert bits(PackedWeight.of(quantize(weight, 8))) == 8 + 32 / 256
    assert bits(PackedWeight.of(quantize(weight, 4))) == 4 + 2 * 16 / 32
