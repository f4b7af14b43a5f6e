"""Native code unpacks and packs quantized weights as NumPy does, bit for bit."""

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from spec_jax.checkpoints import gguf_blocks
from spec_jax.kernels import PackedWeight, Quantized, native, native_blocks
from tests.kernels.test_integer_products import FORMATS, quantized

pytestmark = pytest.mark.native


def equal(one, other):
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert (array.dtype, array.shape) == (other[name].dtype, other[name].shape), name
        assert array.tobytes() == other[name].tobytes(), name


@pytest.mark.parametrize(
    "kind", [GGMLQuantizationType(each) for each in native_blocks.NATIVE_KINDS]
)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (48, 5), (3000, 3)])
def test_blocks_are_unpacked(monkeypatch, kind, rows, blocks):
    size = blocks * GGML_QUANT_SIZES[kind][1]
    data = np.random.default_rng(0).integers(0, 256, (rows, size), np.uint8)
    by_native = gguf_blocks.unpack(data, kind).arrays
    monkeypatch.setattr(native, "loaded", lambda: None)
    equal(by_native, gguf_blocks.unpack(data, kind).arrays)


@pytest.mark.parametrize("activations", ["float32", "int8"])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("inputs", "outputs", "is_stack"),
    [(32, 16, False), (576, 1040, False), (96, 17, False), (80, 32, False), (32, 24, True)],
)
def test_values_are_packed(monkeypatch, kind, inputs, outputs, is_stack, activations):
    weight = quantized(kind, inputs, outputs)
    if is_stack:
        weight = Quantized.stack([weight, quantized(kind, inputs, outputs, seed=1)])

    def arrays():
        packed = PackedWeight.of(weight, activations)
        parts = {"values": packed.values} | dict(enumerate(packed.scaling))
        return {name: np.asarray(part) for name, part in parts.items() if part is not None}

    by_native = arrays()
    monkeypatch.setattr(native, "loaded", lambda: None)
    equal(by_native, arrays())


def test_whole_panels_are_packed_by_native_code():
    values = quantized("Q4_K", 64, 48).values
    assert native_blocks.pack_words(values, 4, 0).shape == (3, 8, 16)
    assert native_blocks.pack_words(values[:40], 4, 0) is None
    assert native_blocks.pack_words(values[:, :40], 4, 0) is None
