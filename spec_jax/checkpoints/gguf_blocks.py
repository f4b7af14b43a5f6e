"""GGUF's quantized blocks as values, scales and minima, without changing a number.

The blocks: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. Each function takes the
bytes [rows, blocks, bytes of a block] of one type.
"""

import dataclasses
import functools

import gguf.quants
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from spec_jax.kernels import Quantized, QuantizedForm
from spec_jax.kernels.native_blocks import NATIVE_KINDS, unpack_blocks
from spec_jax.kernels.row_blocks import in_row_blocks


def unpack(data: np.ndarray, kind: GGMLQuantizationType) -> Quantized | None:
    """A matrix as stored, or None if blocks of this type are not multiplied as they are.

    Args:
      data: bytes [out, bytes of a row].
      kind: the type of its blocks.
    """
    if kind not in _BLOCKS:
        return None
    inputs, size = GGML_QUANT_SIZES[kind]
    blocks = np.asarray(data).reshape(len(data), -1, size)
    form = _BLOCKS[kind](blocks[:1, :1])
    parts = unpack_blocks(blocks, kind, form) if kind in NATIVE_KINDS else None
    if parts is None:

        def unpack_rows(rows: slice) -> list[np.ndarray]:
            return [*_BLOCKS[kind](blocks[rows]).arrays.values()]

        parts = in_row_blocks(unpack_rows, len(blocks), blocks.shape[1] * inputs)
    return dataclasses.replace(form, **dict(zip(form.arrays, parts, strict=True)))


@functools.cache
def form_of(kind: GGMLQuantizationType) -> QuantizedForm | None:
    """The form of a matrix of such blocks as XLA multiplies it; None if `unpack` returns None."""
    if kind not in _BLOCKS:
        return None
    inputs, size = GGML_QUANT_SIZES[kind]
    block = _BLOCKS[kind](np.zeros((1, 1, size), np.uint8)).simplified()
    group = inputs // block.scales.shape[-1]
    return QuantizedForm(block.bits, group, block.scales.dtype.name, block.minima is not None)


def _q8_0(blocks: np.ndarray) -> Quantized:
    values = blocks[:, :, 2:].view(np.int8)
    return Quantized(_flat(values), _halves(blocks[:, :, :2]), None, 8)


def _q4_0(blocks: np.ndarray) -> Quantized:
    values = _nibbles(blocks[:, :, 2:]).astype(np.int8) - np.int8(8)
    return Quantized(values, _halves(blocks[:, :, :2]), None, 4)


def _q4_1(blocks: np.ndarray) -> Quantized:
    scales, minima = _halves(blocks[:, :, :2]), _halves(blocks[:, :, 2:4])
    return Quantized(_nibbles(blocks[:, :, 4:]), scales, minima, 4)


def _q5_0(blocks: np.ndarray) -> Quantized:
    values = _with_fifth_bits(blocks[:, :, 6:], blocks[:, :, 2:6]).astype(np.int8) - np.int8(16)
    return Quantized(values, _halves(blocks[:, :, :2]), None, 5)


def _q5_1(blocks: np.ndarray) -> Quantized:
    scales, minima = _halves(blocks[:, :, :2]), _halves(blocks[:, :, 2:4])
    return Quantized(_with_fifth_bits(blocks[:, :, 8:], blocks[:, :, 4:8]), scales, minima, 5)


def _q2_k(blocks: np.ndarray) -> Quantized:
    values = _flat(_pairs(blocks[:, :, 16:80]))
    scales, minima = _flat(blocks[:, :, :16] & 15), _flat(blocks[:, :, :16] >> 4)
    return _in_blocks(values, scales, minima, 4, blocks[:, :, 80:82], blocks[:, :, 82:])


def _q3_k(blocks: np.ndarray) -> Quantized:
    # The highest bits of 32 neighbours are in 32 bytes, whose lowest bits come first.
    high = blocks[:, :, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    low = _pairs(blocks[:, :, 32:96]).reshape(high.shape)
    values = (low | high << 2).astype(np.int8) - np.int8(4)
    packed = blocks[:, :, 96:108]
    high = packed[:, :, None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    scales = _split_nibbles(packed[:, :, :8]).reshape(high.shape) | high << 4
    return _in_blocks(values, scales.astype(np.int8) - np.int8(32), None, 4, blocks[:, :, 108:])


def _q4_k(blocks: np.ndarray) -> Quantized:
    values = _nibbles(blocks[:, :, 16:].reshape(*blocks.shape[:2], 4, 32))
    return _in_blocks(values, *_k_scales(blocks), 4, blocks[:, :, :2], blocks[:, :, 2:4])


def _q5_k(blocks: np.ndarray) -> Quantized:
    low = _split_nibbles(blocks[:, :, 48:].reshape(*blocks.shape[:2], 4, 32))
    bits = blocks[:, :, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    values = low.reshape(bits.shape) | bits << 4
    return _in_blocks(values, *_k_scales(blocks), 5, blocks[:, :, :2], blocks[:, :, 2:4])


def _q6_k(blocks: np.ndarray) -> Quantized:
    # Two halves of 128: 64 bytes of low and 32 bytes of high bits, whose 4 x 32 numbers follow.
    low = _split_nibbles(blocks[:, :, :128].reshape(*blocks.shape[:2], 2, 64))
    high = _pairs(blocks[:, :, 128:192]).reshape(*blocks.shape[:2], 2, 4, 32)
    values = (low.reshape(high.shape) | high << 4).astype(np.int8) - np.int8(32)
    return _in_blocks(values, blocks[:, :, 192:208], None, 6, blocks[:, :, 208:])


def _iq4_nl(blocks: np.ndarray) -> Quantized:
    return Quantized(_LEVELS[_nibbles(blocks[:, :, 2:])], _halves(blocks[:, :, :2]), None, 8)


def _iq4_xs(blocks: np.ndarray) -> Quantized:
    low = np.stack([blocks[:, :, 4:8] & 15, blocks[:, :, 4:8] >> 4], axis=-1)
    high = blocks[:, :, 2:4, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
    scales = (low.reshape(*low.shape[:2], 8) | high.reshape(*low.shape[:2], 8) << 4).astype(np.int8)
    values = _LEVELS[_nibbles(blocks[:, :, 8:].reshape(*blocks.shape[:2], 8, 16))]
    return _in_blocks(values, scales - np.int8(32), None, 8, blocks[:, :, :2])


def _in_blocks(
    values: np.ndarray,
    scales: np.ndarray,
    minima: np.ndarray | None,
    bits: int,
    scale_units: np.ndarray,
    minimum_units: np.ndarray | None = None,
) -> Quantized:
    """A matrix in blocks of 256 inputs, each with the units of its scales and minima."""
    return Quantized(
        _flat(values),
        _flat(scales).view(np.int8),
        None if minima is None else _flat(minima).view(np.int8),
        bits,
        _halves(scale_units),
        None if minimum_units is None else -_halves(minimum_units),
    )


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima of the eight groups of 32 in a block of Q4_K or Q5_K, 6 bits each."""
    a, b, c = np.split(blocks[:, :, 4:16], 3, axis=2)
    scales = np.concatenate([a & 63, c & 15 | a >> 2 & 48], axis=2)
    return scales, np.concatenate([b & 63, c >> 4 | b >> 2 & 48], axis=2)


def _halves(two_bytes: np.ndarray) -> np.ndarray:
    """Numbers of half precision, one a block."""
    return np.ascontiguousarray(two_bytes).view(np.float16)[..., 0]


def _split_nibbles(data: np.ndarray) -> np.ndarray:
    """The low halves of all bytes, then the high ones."""
    halves = np.empty((*data.shape[:-1], 2, data.shape[-1]), np.uint8)
    np.bitwise_and(data, 15, out=halves[..., 0, :])
    np.right_shift(data, 4, out=halves[..., 1, :])
    return halves


def _nibbles(data: np.ndarray) -> np.ndarray:
    return _flat(_split_nibbles(data))


def _pairs(data: np.ndarray) -> np.ndarray:
    """Numbers of 2 bits: the lowest of 32 neighbouring bytes, then the next, [..., 32]."""
    parts = data.reshape(*data.shape[:-1], -1, 1, 32)
    return parts >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3


def _with_fifth_bits(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Numbers of 5 bits: 16 bytes of low halves and 4 bytes of the highest bits a block."""
    bits = np.unpackbits(np.ascontiguousarray(high), axis=-1, bitorder="little")
    return _nibbles(low) | _flat(bits) << 4


def _flat(numbers: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(numbers.reshape(len(numbers), -1))


_LEVELS = np.array(gguf.quants.IQ4_NL.kvalues, np.int8)
_BLOCKS = {
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q2_K: _q2_k,
    GGMLQuantizationType.Q3_K: _q3_k,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
    GGMLQuantizationType.IQ4_NL: _iq4_nl,
    GGMLQuantizationType.IQ4_XS: _iq4_xs,
}
