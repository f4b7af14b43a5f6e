"""Reads the header of a GGUF file: metadata, and where each tensor lies.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3. The
`gguf` package reads it too, but takes seconds for a vocabulary, and trusts every count.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""Value types -> codes of `struct`."""
_PLAIN = {
    GGMLQuantizationType.F16: np.float16,
    GGMLQuantizationType.F32: np.float32,
    GGMLQuantizationType.F64: np.float64,
    GGMLQuantizationType.I8: np.int8,
    GGMLQuantizationType.I16: np.int16,
    GGMLQuantizationType.I32: np.int32,
    GGMLQuantizationType.I64: np.int64,
}
"""Types whose elements are stored as they are; all others are read as bytes."""
_MAX_ENTRIES = 2**22
"""Of an array: vocabularies have fewer, and Python keeps 32 bytes for each."""
_MAX_DIMENSIONS = 8


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a GGUF file.

    Attributes:
      kind: how its elements are stored.
      shape: its shape; matrices are [out, in].
      offset: of its first byte in the file.
      dtype: of the array that holds it: the elements', or bytes.
      stored_shape: of that array; the last dimension of bytes is a row's.
    """

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    dtype: np.dtype
    stored_shape: tuple[int, ...]


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """The metadata of a GGUF file, arrays as lists, and its tensors by name.

    Every count is checked against the bytes that are left before anything is allocated for it.

    Raises:
      ValueError: it is not a GGUF file of a known version, or its header contradicts itself
        or the size of the file.
      OSError: it cannot be read.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = Reader(data)
        if reader.bytes(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = reader.scalar("I")
        if version & 0xFFFF == 0:
            reader.order, version = ">", int.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} is unknown")
        tensors, fields = reader._count(24), reader._count(13)
        metadata: dict[str, Any] = {}
        for _ in range(fields):
            name = reader._string()
            if name in metadata:
                raise ValueError(f"it has two fields {name!r}")
            metadata[name] = reader._value(reader.scalar("I"))
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment!r}, which is not a power of two")
        stored = [reader._tensor() for _ in range(tensors)]
        begin = -(-reader.position // alignment) * alignment
        return metadata, _placed(stored, begin, len(data), alignment, reader.order)


_Order = Literal["<", ">"]
_Described = tuple[str, tuple[int, ...], GGMLQuantizationType, int]
"""A tensor's name, shape, kind, and offset among the tensors."""


class Reader:
    """Reads values one after another; none reaches past the end of the data."""

    def __init__(self, data: mmap.mmap):
        self.data, self.position = data, 0
        self.order: _Order = "<"

    def skip(self, size: int) -> None:
        """Moves past some bytes."""
        begin, self.position = self.position, self.position + size
        if self.position > len(self.data):
            raise ValueError(f"{size} bytes are declared at byte {begin} of {len(self.data)}")

    def bytes(self, size: int) -> bytes:
        """The next bytes."""
        self.skip(size)
        return self.data[self.position - size : self.position]

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        """The next numbers, of a type as `struct` names it."""
        layout = f"{self.order}{count}{code}"
        return struct.unpack(layout, self.bytes(struct.calcsize(layout)))

    def scalar(self, code: str) -> Any:
        """The next number."""
        return self.numbers(code, 1)[0]

    def _count(self, min_size: int) -> int:
        """A declared number of entries that take at least `min_size` bytes each."""
        count = self.scalar("Q")
        if count * min_size > len(self.data) - self.position:
            raise ValueError(f"{count} entries are declared, for which the file is too short")
        return count

    def _string(self) -> str:
        return self.bytes(self.scalar("Q")).decode()

    def _strings(self, count: int) -> list[str]:
        """The next strings; vocabularies have hundreds of thousands."""
        size_of, data = struct.Struct(f"{self.order}Q").unpack_from, self.data
        at, last, strings = self.position, len(data) - 8, []
        for _ in range(count):
            size = size_of(data, at)[0] if at <= last else 0
            end = at + 8 + size
            if end > last + 8:
                self.skip(end - self.position)  # says what is missing
            strings.append(data[at + 8 : end].decode())
            at = end
        self.position = at
        return strings

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise ValueError(f"a value has the unknown type {kind}")
        kind = self.scalar("I")
        if kind != _STRING and kind not in _SCALARS:
            raise ValueError(f"an array has entries of the type {kind}, which is not supported")
        count = self._count(8 if kind == _STRING else struct.calcsize(_SCALARS[kind]))
        if count > _MAX_ENTRIES:
            raise ValueError(f"an array has {count} entries, more than {_MAX_ENTRIES}")
        if kind == _STRING:
            return self._strings(count)
        return list(self.numbers(_SCALARS[kind], count))

    def _tensor(self) -> _Described:
        name, dimensions = self._string(), self.scalar("I")
        if dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {dimensions} dimensions")
        shape = self.numbers("Q", dimensions)[::-1]  # the fastest dimension comes first
        return name, shape, GGMLQuantizationType(self.scalar("I")), self.scalar("Q")


def _placed(
    tensors: list[_Described], begin: int, end: int, alignment: int, order: _Order
) -> dict[str, StoredTensor]:
    """The tensors, after a check that each lies between two positions of the file."""
    placed: dict[str, StoredTensor] = {}
    expected = 0
    for name, shape, kind, offset in tensors:
        if name in placed:
            raise ValueError(f"it has two tensors {name!r}")
        if 0 in shape:
            raise ValueError(f"tensor {name!r} of shape {shape} holds nothing")
        block, block_bytes = GGML_QUANT_SIZES[kind]
        width = shape[-1] if shape else 1
        if width % block:
            raise ValueError(f"tensor {name!r} has rows of {width}, no multiple of {block}")
        size = math.prod(shape) // block * block_bytes
        if begin + offset + size > end:
            raise ValueError(f"tensor {name!r} of shape {shape} reaches past the end")
        # As llama.cpp, which refuses files whose tensors overlap or leave gaps.
        if offset != expected:
            raise ValueError(f"tensor {name!r} begins at {offset} instead of {expected}")
        expected += -(-size // alignment) * alignment
        if kind in _PLAIN:
            dtype, stored_shape = np.dtype(_PLAIN[kind]).newbyteorder(order), shape
        else:
            dtype, stored_shape = np.dtype(np.uint8), (*shape[:-1], width // block * block_bytes)
        placed[name] = StoredTensor(kind, shape, begin + offset, dtype, stored_shape)
    # Otherwise a wrong type of the last tensor, say, would pass for one that takes fewer bytes.
    if begin + expected < end:
        raise ValueError(f"{end - begin - expected} bytes follow the last tensor")
    return placed
