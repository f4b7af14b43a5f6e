"""GGUF's quantized blocks as values, scales and minima, without changing a number.

The blocks: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. Each function takes the
bytes [rows, blocks, bytes of a block] of one type.
"""

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from spec_jax.kernels import Quantized


def unpack(data: np.ndarray, kind: GGMLQuantizationType) -> Quantized | None:
    """A matrix as stored, or None if blocks of this type are not multiplied as they are.

    Args:
      data: bytes [out, bytes of a row].
      kind: the type of its blocks.
    """
    if kind not in _BLOCKS:
        return None
    _, size = GGML_QUANT_SIZES[kind]
    return _BLOCKS[kind](np.asarray(data).reshape(len(data), -1, size))


def _q8_0(blocks: np.ndarray) -> Quantized:
    values = blocks[:, :, 2:].view(np.int8)
    return Quantized(_flat(values), _halves(blocks[:, :, :2]), None, 8)


def _q4_0(blocks: np.ndarray) -> Quantized:
    scales = _halves(blocks[:, :, :2])
    # The least number is -8 scales, which half precision may not hold.
    minima = np.float32(-8) * scales
    return Quantized(_nibbles(blocks[:, :, 2:]), scales.astype(np.float32), minima, 4)


def _q4_1(blocks: np.ndarray) -> Quantized:
    scales, minima = _halves(blocks[:, :, :2]), _halves(blocks[:, :, 2:4])
    return Quantized(_nibbles(blocks[:, :, 4:]), scales, minima, 4)


def _q5_0(blocks: np.ndarray) -> Quantized:
    values = _with_fifth_bits(blocks[:, :, 6:], blocks[:, :, 2:6]) - np.int8(16)
    return Quantized(values, _halves(blocks[:, :, :2]), None, 8)


def _q5_1(blocks: np.ndarray) -> Quantized:
    scales, minima = _halves(blocks[:, :, :2]), _halves(blocks[:, :, 2:4])
    return Quantized(_with_fifth_bits(blocks[:, :, 8:], blocks[:, :, 4:8]), scales, minima, 8)


def _q4_k(blocks: np.ndarray) -> Quantized:
    scales, minima = _k_scales(blocks)
    return Quantized(
        _nibbles(blocks[:, :, 16:].reshape(*blocks.shape[:2], 4, 32)), scales, minima, 4
    )


def _q5_k(blocks: np.ndarray) -> Quantized:
    scales, minima = _k_scales(blocks)
    low = _split_nibbles(blocks[:, :, 48:].reshape(*blocks.shape[:2], 4, 32))
    bits = blocks[:, :, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    values = low.reshape(bits.shape) | bits << 4
    return Quantized(_flat(values).astype(np.int8), scales, minima, 8)


def _q6_k(blocks: np.ndarray) -> Quantized:
    # Two halves of 128: 64 bytes of low and 32 bytes of high bits, whose 4 x 32 numbers follow.
    low = _split_nibbles(blocks[:, :, :128].reshape(*blocks.shape[:2], 2, 64))
    high = blocks[:, :, 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    high = high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    values = (low.reshape(high.shape) | high << 4).astype(np.int8) - np.int8(32)
    steps = _halves(blocks[:, :, 208:])[:, :, None].astype(np.float32)
    scales = steps * blocks[:, :, 192:208].view(np.int8)
    return Quantized(_flat(values), _flat(scales), None, 8)


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima of the eight groups of 32 in a block of Q4_K or Q5_K, 6 bits each."""
    steps = _halves(blocks[:, :, :2])[:, :, None].astype(np.float32)
    least = _halves(blocks[:, :, 2:4])[:, :, None].astype(np.float32)
    a, b, c = np.split(blocks[:, :, 4:16], 3, axis=2)
    scales = np.concatenate([a & 63, c & 15 | a >> 2 & 48], axis=2)
    minima = np.concatenate([b & 63, c >> 4 | b >> 2 & 48], axis=2)
    return _flat(steps * scales), _flat(-(least * minima))


def _halves(two_bytes: np.ndarray) -> np.ndarray:
    """Numbers of half precision, one a block."""
    return np.ascontiguousarray(two_bytes).view(np.float16)[..., 0]


def _split_nibbles(data: np.ndarray) -> np.ndarray:
    """The low halves of all bytes, then the high ones."""
    return np.stack([data & 15, data >> 4], axis=-2)


def _nibbles(data: np.ndarray) -> np.ndarray:
    return _flat(_split_nibbles(data))


def _with_fifth_bits(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Numbers of 5 bits: 16 bytes of low halves and 4 bytes of the highest bits a block."""
    bits = np.unpackbits(np.ascontiguousarray(high), axis=-1, bitorder="little")
    return (_nibbles(low) | _flat(bits) << 4).astype(np.int8)


def _flat(numbers: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(numbers.reshape(len(numbers), -1))


_BLOCKS = {
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
}
