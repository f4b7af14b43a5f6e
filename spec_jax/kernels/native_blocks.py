"""Native code that unpacks and packs quantized weights as they are loaded.

Both functions do what NumPy does elsewhere, bit for bit, in one pass over the memory. They return
None where they cannot: NumPy must do it.
"""

import ctypes

import numpy as np
from jaxtyping import Shaped, UInt8, UInt32

from spec_jax.kernels import native
from spec_jax.kernels.quantize import Quantized
from spec_jax.kernels.row_blocks import in_row_blocks

NATIVE_KINDS = frozenset({2, 3, 6, 8, 12, 13, 14})
"""The types of blocks that native code unpacks: Q4_0, Q4_1, Q5_0, Q8_0, Q4_K, Q5_K and Q6_K."""
_PARTS = "values", "scales", "minima", "scale_units", "minimum_units"
_INPUTS, _LANES = 32, 16
"""Inputs of some whole words, and outputs of a panel."""


def pack_words(
    values: Shaped[np.ndarray, "*stack out in"], bits: int, offset: int
) -> UInt32[np.ndarray, "*stack panels words 16"] | None:
    """Values of 4 to 8 bits as the words of panels, as `PackedWeight` describes them.

    Args:
      values: int8 or uint8.
      bits: of a value after `offset` is added.
      offset: what is added to each value.
    """
    library, (*stack, outputs, inputs) = native.loaded(), values.shape
    if library is None or outputs % _LANES or inputs % _INPUTS:
        return None
    panels = np.ascontiguousarray(values).reshape(-1, _LANES, inputs)

    def pack(some: slice) -> list[np.ndarray]:
        part = panels[some]
        words = np.empty((len(part), inputs * bits // 32, _LANES), np.uint32)
        library.spec_jax_pack(
            _address(part), *map(ctypes.c_int64, (len(part), inputs)), bits, offset, _address(words)
        )
        return [words]

    (words,) = in_row_blocks(pack, len(panels), panels[0].size)
    return words.reshape(*stack, -1, *words.shape[1:])


def unpack_blocks(
    blocks: UInt8[np.ndarray, "rows blocks bytes"], kind: int, form: Quantized
) -> list[np.ndarray] | None:
    """The arrays of a matrix that is stored in blocks of GGUF.

    Args:
      blocks: bytes.
      kind: the number of their type in ggml.h, of `NATIVE_KINDS`.
      form: the first block of the matrix.
    """
    library, count = native.loaded(), blocks.shape[1]
    if library is None:
        return None
    parts = [getattr(form, name) for name in _PARTS]

    def unpack(rows: slice) -> list[np.ndarray]:
        some = np.ascontiguousarray(blocks[rows])
        arrays = [
            None if part is None else np.empty((len(some), count * part.shape[1]), part.dtype)
            for part in parts
        ]
        sizes = map(ctypes.c_int64, (len(some) * count, some.shape[2]))
        library.spec_jax_unpack(int(kind), _address(some), *sizes, *map(_address, arrays))
        return [array for array in arrays if array is not None]

    return in_row_blocks(unpack, len(blocks), count * form.values.shape[1])


def _address(array: np.ndarray | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)
