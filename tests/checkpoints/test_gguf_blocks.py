"""GGUF's blocks keep every number when they are taken apart."""

import gguf
import jax
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from spec_jax.checkpoints.gguf_blocks import unpack
from spec_jax.kernels import PackedWeight

KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
KINDS += ("IQ4_NL", "IQ4_XS")
HALVES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
"""Where blocks keep numbers of half precision."""


def blocks(kind, rows=6, count=2):
    """Random bytes, but for finite scales."""
    random = np.random.default_rng(0)
    _, size = GGML_QUANT_SIZES[kind]
    data = random.integers(0, 256, (rows, count, size), np.uint8)
    for at in HALVES[kind.name]:
        scales = random.normal(0, 0.1, (rows, count, 1)).astype(np.float16)
        data[:, :, at : at + 2] = scales.view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("name", KINDS)
def test_no_number_changes(name):
    kind = GGMLQuantizationType[name]
    data = blocks(kind)
    expected = gguf.dequantize(data, kind)
    made = unpack(data, kind)
    np.testing.assert_array_equal(made.dequantize(), expected)
    np.testing.assert_array_equal(PackedWeight.of(made).dequantize(), expected.T)
    narrow = PackedWeight.of(made, "int8")
    np.testing.assert_array_equal(narrow.dequantize(), expected.T)
    group = 16 if name in ("Q2_K", "Q3_K", "Q6_K") else 32
    assert made.scales.shape[1] == expected.shape[1] // group


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
def test_weights_take_as_much_memory_as_in_the_file(name):
    data = blocks(GGMLQuantizationType[name], rows=16)
    weight = PackedWeight.of(unpack(data, GGMLQuantizationType[name]), "int8")
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weight))
    assert data.nbytes <= nbytes <= 1.03 * data.nbytes


def test_other_types_are_not_taken_apart():
    assert unpack(np.zeros((2, 64), np.float32), GGMLQuantizationType.F32) is None
    assert unpack(np.zeros((2, 110), np.uint8), GGMLQuantizationType.IQ3_S) is None
