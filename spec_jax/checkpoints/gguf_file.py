"""Reads GGUF files: the header in one quick pass, then tensors one by one.

The `gguf` package dequantizes; its own reader makes an array of every string in a vocabulary,
which takes longer than everything else about loading a small model.
"""

import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from spec_jax.checkpoints.files import damaged
from spec_jax.errors import CheckpointError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)


class GgufFile:
    """A GGUF file's metadata and tensors.

    Attributes:
      path: the file.
      metadata: every key of the header; arrays are lists.
      shapes: shape of every tensor; matrices are [out, in].

    Raises:
      CheckpointError: the file is truncated, damaged, or of a version that is not supported.
    """

    def __init__(self, path: Path):
        self.path = path
        if path.stat().st_size == 0:
            raise damaged(path, "it is empty")
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._bytes = np.frombuffer(mapped, np.uint8)
        header = _Header(memoryview(mapped))
        try:
            self._parse(header)
        except (struct.error, UnicodeDecodeError, OverflowError, MemoryError) as error:
            raise damaged(path, f"its header ends early or makes no sense ({error})") from None

    def _parse(self, header: "_Header") -> None:
        if bytes(self._bytes[:4]) != b"GGUF":
            raise damaged(self.path, "it does not begin with 'GGUF'")
        header.at = 4
        version = header.scalar("I")
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{self.path}: GGUF version {version} is not supported; spec-jax reads "
                f"little-endian files of version {' and '.join(map(str, _VERSIONS))}."
            )
        tensor_count, key_count = header.scalar("Q"), header.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = header.string()
            self.metadata[key] = header.value(header.scalar("I"))
        self._places: dict[str, tuple[GGMLQuantizationType, int]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for _ in range(tensor_count):
            name = header.string()
            sizes = [header.scalar("Q") for _ in range(header.scalar("I"))]
            kind, offset = header.scalar("I"), header.scalar("Q")
            try:
                quantization = GGMLQuantizationType(kind)
            except ValueError:
                raise CheckpointError(
                    f"{self.path}: tensor {name!r} is quantized in a way (number {kind}) that the "
                    "installed gguf package does not know; a newer one may."
                ) from None
            self._places[name] = quantization, offset
            self.shapes[name] = tuple(reversed(sizes))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise damaged(self.path, f"general.alignment is {alignment!r}")
        self._start = math.ceil(header.at / alignment) * alignment
        for name, shape in self.shapes.items():
            if not shape or 0 in shape or shape[-1] % GGML_QUANT_SIZES[self._places[name][0]][0]:
                raise damaged(self.path, f"tensor {name!r} has shape {shape}")
            if self._start + self._places[name][1] + self._size(name) > len(self._bytes):
                raise damaged(self.path, f"tensor {name!r} reaches past the file's end")

    def _size(self, name: str) -> int:
        block, size = GGML_QUANT_SIZES[self._places[name][0]]
        return math.prod(self.shapes[name]) // block * size

    def read(self, name: str) -> np.ndarray:
        """One tensor, dequantized to float32 (a view of the file if it is stored so).

        Raises:
          CheckpointError: its quantization cannot be undone.
        """
        quantization, offset = self._places[name]
        start = self._start + offset
        rows = self._bytes[start : start + self._size(name)].reshape(*self.shapes[name][:-1], -1)
        try:
            return dequantize(rows, quantization).reshape(self.shapes[name])
        except NotImplementedError:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is of type {quantization.name}, which cannot be "
                "dequantized; use a file of type F16, BF16, Q8_0 or Q4_K."
            ) from None


class _Header:
    """A cursor over the header's bytes; reading past the end raises `struct.error`."""

    def __init__(self, data: memoryview):
        self.data, self.at = data, 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        size = self.scalar("Q")
        if self.at + size > len(self.data):
            raise struct.error(f"a string of {size} bytes at byte {self.at}")
        self.at += size
        return str(self.data[self.at - size : self.at], "utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(self._code(kind))
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        if kind == _ARRAY:
            raise struct.error("an array of arrays")
        code = f"{count}{self._code(kind)}"
        values = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return list(values)

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise struct.error(f"a value of unknown type {kind}")
        return _SCALARS[kind]
