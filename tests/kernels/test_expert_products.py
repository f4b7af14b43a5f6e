"""Products with experts equal float64's, whoever chooses whom; no other expert matters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.kernels import (
    PackedWeight,
    Quantized,
    QuantizedWeight,
    Tiles,
    expert_products,
    quantize,
)
from tests.kernels.test_products import FORMATS, check, for_xla, matrix

COUNT, INPUTS = 6, 64
OUTPUTS = (40, 23)


def stacks(kind):
    """For each of some stacks its matrices, and the stack [experts, out, in]."""
    made = [
        [matrix(kind, INPUTS, outputs, seed=10 * outputs + i) for i in range(COUNT)]
        for outputs in OUTPUTS
    ]
    if isinstance(made[0][0], Quantized):
        return made, [Quantized.stack(each) for each in made]
    return made, [np.stack(each) for each in made]


def choices(tokens, per_token, most=COUNT, seed=0):
    """What each of some tokens chooses; none chooses an expert twice."""
    random = np.random.default_rng(seed)
    chosen = [random.choice(most, per_token, replace=False) for _ in range(tokens)]
    return np.concatenate(chosen).astype(np.int32)


def check_rows(x, chosen, matrices, found):
    for each, out in zip(matrices, found, strict=True):
        for expert in set(chosen):
            rows = np.flatnonzero(chosen == expert)
            check(x[rows], each[expert], np.asarray(out)[rows])


def rows_of(chosen, seed=1):
    return np.random.default_rng(seed).standard_normal((len(chosen), INPUTS)).astype(np.float32)


@pytest.mark.native
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("tokens", [1, 5, 90])
def test_native_products_equal_float64(kind, tokens):
    matrices, made = stacks(kind)
    chosen = choices(tokens, 2)
    x = rows_of(chosen)
    packed = [PackedWeight.of(each) for each in made]
    check_rows(x, chosen, matrices, jax.jit(expert_products)(x, chosen, packed))


@pytest.mark.native
def test_native_products_of_different_formats():
    matrices, made = zip(*(stacks(kind) for kind in FORMATS), strict=True)
    chosen = choices(7, 3)
    x = rows_of(chosen)
    packed = [PackedWeight.of(each[0]) for each in made]
    found = jax.jit(expert_products)(x, chosen, packed)
    check_rows(x, chosen, [each[0] for each in matrices], found)


@pytest.mark.native
def test_an_expert_that_is_not_there_is_an_error():
    packed = [PackedWeight.of(stacks("float32")[1][0])]
    with pytest.raises(jax.errors.JaxRuntimeError, match="there is no such expert"):
        expert_products(jnp.ones((1, INPUTS)), jnp.asarray([COUNT], jnp.int32), packed)


def tiled(x, chosen, weights, *, here=COUNT, tokens, skip=True):
    @jax.jit
    def multiply(x, chosen, weights):
        tiles = Tiles.of(chosen, here=here, count=COUNT, tokens=tokens)
        return tiles.products(x, weights, skip=skip), tiles.used

    return multiply(x, chosen, weights)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4", "int8 in groups"])
@pytest.mark.parametrize("tokens", [1, 5, 90])
def test_products_by_xla_equal_float64(kind, tokens):
    matrices, made = stacks(kind)
    chosen = choices(tokens, 2)
    x = rows_of(chosen)
    if isinstance(made[0], Quantized):
        weights = [for_xla(each) for each in made]
    else:
        weights = [jnp.asarray(each.swapaxes(1, 2)) for each in made]
    found, _ = tiled(x, chosen, weights, tokens=tokens)
    check_rows(x, chosen, matrices, found)


def plain():
    matrices, made = stacks("float32")
    return matrices, [jnp.asarray(each.swapaxes(1, 2)) for each in made]


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(
    ("tokens", "per_token", "most"),
    # One expert for all, two that all choose, some, and every one.
    [(200, 1, 1), (200, 2, 2), (3, 1, 6), (50, 3, 4), (200, 6, 6)],
)
def test_no_row_is_left_out(tokens, per_token, most, skip):
    """However many rows want one expert, and however few."""
    matrices, weights = plain()
    chosen = choices(tokens, per_token, most)
    x = rows_of(chosen)
    found, used = tiled(x, chosen, weights, tokens=tokens, skip=skip)
    check_rows(x, chosen, matrices, found)
    assert used <= len(chosen) and used >= len(set(chosen))
    if tokens <= 8:
        assert used == len(set(chosen))


@pytest.mark.parametrize("tokens", [1, 4, 40])
def test_experts_of_other_devices_are_left_out(tokens):
    """Two devices that hold three experts each: their sums are the whole."""
    matrices, weights = plain()
    chosen = choices(tokens, 2)
    x, half = rows_of(chosen), COUNT // 2
    parts = []
    for first in (0, half):
        own = [each[first : first + half] for each in weights]
        found, used = tiled(x, chosen - first, own, here=half, tokens=tokens)
        mine = (first <= chosen) & (chosen < first + half)
        assert used >= len(set(chosen[mine])) and (used > 0) == mine.any()
        for each in found:
            assert not np.asarray(each)[~mine].any()
        parts.append(found)
    check_rows(x, chosen, matrices, [a + b for a, b in zip(*parts, strict=True)])


@pytest.mark.parametrize("native", [pytest.param(True, marks=pytest.mark.native), False])
def test_what_nobody_chose_does_not_matter(native):
    matrices, made = stacks("float32")
    chosen = np.array([4, 1, 4], np.int32)
    x = rows_of(chosen)
    for each in made:
        each[[0, 2, 3, 5]] = np.nan
    if native:
        packed = [PackedWeight.of(each) for each in made]
        found = expert_products(jnp.asarray(x), jnp.asarray(chosen), packed)
    else:
        weights = [jnp.asarray(each.swapaxes(1, 2)) for each in made]
        found, _ = tiled(x, chosen, weights, tokens=2)
    check_rows(x, chosen, matrices, found)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_stack_is_rounded_as_its_matrices_are(kind):
    bits = 8 if kind == "int8" else 4
    weights = np.random.default_rng(0).standard_normal((3, 20, 64)).astype(np.float32)
    apart = [quantize(each, bits) for each in weights]
    whole = Quantized.stack(apart)
    expected = np.stack([each.dequantize() for each in apart])
    np.testing.assert_array_equal(whole.dequantize(), expected)
    for form in (PackedWeight.of(whole), QuantizedWeight.of(whole, "float32")):
        np.testing.assert_array_equal(form.dequantize(), expected.swapaxes(1, 2))
