"""Products of activations in 8 bits equal float64's, and a row's do not depend on other rows."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spec_jax.kernels import PackedWeight, Quantized, expert_products, products, take_outputs
from tests.kernels.test_products import check, in_full, matrix, multiply

OTHERS = {
    "Q4_0": (4, True, 32, False),
    "Q5_0": (5, True, 32, False),
    "Q5_1": (5, False, 32, False),
    "Q8_0": (8, True, 32, False),
    "Q2_K": (4, False, 16, True),
    "Q3_K": (4, True, 16, True),
    "Q4_K": (4, False, 32, True),
    "Q5_K": (5, False, 32, True),
    "Q6_K": (6, True, 16, True),
    "IQ4_XS": (8, True, 32, True),
}
"""Formats of GGUF: bits, whether values have signs or else minima, inputs of a scale, units."""
FORMATS = ("int8", "int4", "int8 in groups", "int4 of any range", *OTHERS)

pytestmark = pytest.mark.native


def quantized(kind, inputs, outputs, seed=0):
    """A matrix [out, in] of a format; inputs that a group does not divide are one group."""
    if kind not in OTHERS:
        return matrix(kind, inputs, outputs, seed)
    bits, signs, group, units = OTHERS[kind]
    random = np.random.default_rng(seed)
    groups = 1 if inputs % group else inputs // group
    least, dtype = (-(2 ** (bits - 1)), np.int8) if signs else (0, np.uint8)
    values = random.integers(least, least + 2**bits, (outputs, inputs), dtype)

    def numbers(ends, count, dtype=np.float16):
        return random.uniform(-ends, ends, (outputs, count)).astype(dtype)

    if not units:
        return Quantized(values, numbers(2, groups), None if signs else numbers(9, groups), bits)
    blocks = groups // math.gcd(groups, 8)
    scales = numbers(32, groups, np.int8), None if signs else numbers(63, groups, np.int8)
    return Quantized(
        values, *scales, bits, numbers(0.1, blocks), None if signs else numbers(0.1, blocks)
    )


def packed(weight):
    return PackedWeight.of(weight, "int8")


def rounded(x, weight):
    """Activations in 8 bits, as the kernels round them, in float64."""
    inputs, groups = weight.values.shape[-1], weight.scales.shape[-1]
    block = 32 if groups == 1 else inputs // groups
    blocks = np.pad(x, ((0, 0), (0, -inputs % block))).reshape(len(x), -1, block)
    sizes = np.abs(blocks).max(2, keepdims=True)
    inverses = np.divide(np.float32(127), sizes, where=sizes > 0, out=np.zeros_like(sizes))
    numbers = np.rint(blocks * inverses).astype(np.float64) * (sizes / np.float32(127))
    return numbers.reshape(len(x), -1)[:, :inputs]


def normal(rows, inputs, seed=1):
    return np.random.default_rng(seed).standard_normal((rows, inputs)).astype(np.float32)


@pytest.mark.parametrize("kind", FORMATS)
@settings(max_examples=12)
@given(
    rows=st.integers(1, 300),
    inputs=st.integers(1, 400),
    outputs=st.integers(1, 100),
    scale=st.sampled_from([1e-30, 1, 1e20]),
)
@example(rows=1, inputs=1, outputs=1, scale=1)
@example(rows=1, inputs=576, outputs=49, scale=1)
@example(rows=4, inputs=96, outputs=160, scale=1)
@example(rows=8, inputs=96, outputs=33, scale=1)
@example(rows=9, inputs=64, outputs=16, scale=1)
@example(rows=13, inputs=32, outputs=64, scale=1)
@example(rows=20, inputs=80, outputs=64, scale=1)
@example(rows=300, inputs=1536, outputs=31, scale=1)
def test_products_equal_float64(kind, rows, inputs, outputs, scale):
    weight, x = quantized(kind, inputs, outputs), np.float32(scale) * normal(rows, inputs)
    check(rounded(x, weight), weight, np.asarray(multiply(x, [packed(weight)])[0]))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("inputs", [96, 80])
def test_every_weight_counts(kind, inputs):
    """Each row has one input that is not 0."""
    weight = quantized(kind, inputs, 40)
    x = np.diag(normal(1, inputs)[0])
    products = np.asarray(multiply(x, [packed(weight)])[0])
    expected = np.diag(x)[:, None] * in_full(weight).T
    assert np.abs(expected).max(1).min() > 0
    np.testing.assert_allclose(products, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


def test_the_largest_numbers_do_not_overflow():
    ends = (8, -128), (8, 127), (4, 15), (4, -8), (5, 31), (5, -16), (6, 31), (6, -32)
    for bits, number in ends:
        signs = number < 2 ** (bits - 1)
        values = np.full((16, 96), number, np.int8 if signs else np.uint8)
        weight = Quantized(values, np.ones((16, 3), np.float32), None, bits)
        for sign in (1, -1):
            x = np.full((5, 96), sign * 127, np.float32)
            products = np.asarray(multiply(x, [packed(weight)])[0])
            np.testing.assert_array_equal(products, 96.0 * 127 * sign * number)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("rows", [*range(2, 10), 17, 70])
def test_a_row_has_the_same_product_among_others(kind, rows):
    weights = [packed(quantized(kind, 320, outputs)) for outputs in (48, 33)]
    x = normal(rows, 320)
    together = multiply(x, weights)
    for row in {0, 1, rows // 2, rows - 1}:
        alone = multiply(x[row : row + 1], weights)
        for one, among in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one[0], among[row])


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("rows", [1, 5, 20])
def test_nan_and_infinity_pass_through(kind, rows):
    weight, x = quantized(kind, 64, 20), normal(rows, 64)
    x[-1, 5] = np.nan
    products = np.asarray(multiply(x, [packed(weight)])[0])
    assert np.isnan(products[-1]).all()
    assert np.isfinite(products[:-1]).all()
    x[-1, 5:7] = -np.inf, np.nan
    assert np.isnan(np.asarray(multiply(x, [packed(weight)])[0])[-1]).all()
    x[-1, 5:7] = -np.inf, 1
    products = np.asarray(multiply(x, [packed(weight)])[0])
    assert not np.isfinite(products[-1]).any()
    assert np.isfinite(products[:-1]).all()


def test_an_infinity_times_a_number_is_infinite():
    weight, x = matrix("int8", 64, 20), normal(1, 64)
    x[0, 5] = -np.inf
    products = np.asarray(multiply(x, [packed(weight)])[0])[0]
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(products, -np.inf * weight.values[:, 5].astype(np.float32))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("number", [0.0, -0.0, 1e-38, 1e-45])
def test_nothing_gives_zeros(kind, number):
    x = np.full((3, 96), number, np.float32)
    products = np.asarray(multiply(x, [packed(quantized(kind, 96, 20))])[0])
    assert (np.abs(products) <= 1e-30).all()


@pytest.mark.parametrize("kind", FORMATS)
def test_the_numbers_of_a_weight_are_kept(kind):
    weight = quantized(kind, 80, 37)
    form, full = packed(weight), in_full(weight).T.astype(np.float32)
    assert form.shape == (80, 37)
    np.testing.assert_array_equal(jax.jit(PackedWeight.dequantize)(form), full)
    ids = np.array([36, 0, 5])
    x = normal(3, 80)
    expected = np.asarray(multiply(x, [form])[0])[:, ids]
    for some in (jax.jit(take_outputs)(form, ids), take_outputs(form, ids)):
        np.testing.assert_array_equal(some.dequantize(), full[:, ids])
        np.testing.assert_array_equal(multiply(x, [some])[0], expected)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_transposed_matrix_is_packed_as_it_is(kind):
    weight = quantized(kind, 64, 32)
    turned = weight.map(lambda part: np.asfortranarray(part))
    x = normal(3, 64)
    expected = multiply(x, [packed(weight)])[0]
    np.testing.assert_array_equal(multiply(x, [packed(turned)])[0], expected)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("rows", [1, 7, 90])
def test_experts_equal_products_with_their_matrices(kind, rows):
    stacks = [
        [quantized(kind, 64, outputs, seed=outputs + i) for i in range(6)] for outputs in (40, 23)
    ]
    chosen = np.random.default_rng(0).integers(0, 6, rows).astype(np.int32)
    x = normal(rows, 64)
    forms = [packed(Quantized.stack(each)) for each in stacks]
    assert all(form.is_stack for form in forms)
    outputs = jax.jit(expert_products)(jnp.asarray(x), jnp.asarray(chosen), forms)
    for matrices, found in zip(stacks, outputs, strict=True):
        for row in range(rows):
            alone = multiply(x[row : row + 1], [packed(matrices[chosen[row]])])[0]
            np.testing.assert_array_equal(found[row], alone[0])


def test_weights_of_both_kinds_in_one_call():
    weights = [matrix(kind, 64, 20) for kind in ("int8", "int4", "bfloat16")]
    x = normal(3, 64)
    outputs = multiply(x, [PackedWeight.of(weights[0]), *map(packed, weights)])
    check(x, weights[0], outputs[0])
    check(rounded(x, weights[0]), weights[0], outputs[1])
    check(rounded(x, weights[1]), weights[1], outputs[2])
    check(x, weights[2], outputs[3])


def test_groups_that_do_not_fit_are_named():
    weight = Quantized(np.zeros((16, 24), np.int8), np.ones((16, 3), np.float32), None, 8)
    with pytest.raises(ValueError, match="24 inputs in 3 groups"):
        packed(weight)


@pytest.mark.parametrize("activations", ["float32", "int8"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("num_tokens", [[5], [3], [0], [2, 5, 0, 9], [0, 1, 0, 0], [0, 0]])
def test_padding_costs_nothing(kind, activations, num_tokens):
    batch, tokens = len(num_tokens), 5
    weights = [
        PackedWeight.of(quantized(kind, 256, outputs, seed), activations)
        for seed, outputs in enumerate((40, 17))
    ]
    x = np.random.default_rng(1).standard_normal((batch, tokens, 256)).astype(np.float32)
    is_real = np.arange(tokens)[None] < np.array(num_tokens)[:, None]
    call = jax.jit(lambda x, n: products(x, weights, num_tokens=n))
    whole = jax.jit(lambda x: products(x, weights))(x)
    x[~is_real] = np.nan  # is not read
    is_exact = weights[0].activations == "int8"
    for out, full in zip(call(x, jnp.array(num_tokens, jnp.int32)), whole, strict=True):
        atol = 0 if is_exact else 1e-3
        np.testing.assert_allclose(out[is_real], full[is_real], rtol=0, atol=atol)


@pytest.mark.parametrize("activations", ["float32", "int8"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_biases_and_a_residual_are_added_to_products(kind, activations, rows):
    weights = [
        PackedWeight.of(quantized(kind, 256, outputs, seed), activations)
        for seed, outputs in enumerate((40, 17))
    ]
    random = np.random.default_rng(1)
    x = random.standard_normal((1, rows, 256)).astype(np.float32)
    bias = random.standard_normal(17).astype(np.float32)
    residual = random.standard_normal((1, rows, 17)).astype(np.float32)
    plain = [np.asarray(each) for each in jax.jit(lambda x: products(x, weights))(x)]
    first, second = jax.jit(lambda x, b: products(x, weights, biases=[None, b]))(x, bias)
    (summed,) = jax.jit(lambda x, b, r: products(x, weights[1:], biases=[b], residual=r))(
        x, bias, residual
    )
    assert np.array_equal(first, plain[0])
    assert np.array_equal(second, plain[1] + bias)
    assert np.array_equal(summed, plain[1] + bias + residual)
    some = jnp.array([rows - 1], jnp.int32)
    (padded,) = jax.jit(
        lambda x, b, r: products(x, weights[1:], num_tokens=some, biases=[b], residual=r)
    )(x, bias, residual)
    assert np.array_equal(padded[:, :-1], summed[:, :-1])
