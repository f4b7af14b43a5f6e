"""One safetensors file that is read by ranges of bytes, out of an object store.

The format: 8 bytes with the length of a header, the header in JSON (name -> dtype, shape and
place), and the tensors' bytes. https://huggingface.co/docs/safetensors
"""

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import ml_dtypes
import numpy as np

from spec_jax.checkpoints import bucket
from spec_jax.checkpoints.bucket import StoredFile
from spec_jax.errors import CheckpointError
from spec_jax.models.family import Slices

_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""
_MAX_AXES = 8
_FIRST_BYTES = 1 << 20
"""Read first; most headers are shorter."""
_MAX_SMALL_BYTES = 1 << 20
"""Of tensors that are read together, since each would take a round trip."""

_NUMPY = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


class RangedFile:
    """The tensors of one file.

    Args:
      file: where it is.

    Attributes:
      source: its address.
      shapes: shape of every tensor.

    Raises:
      CheckpointError: it cannot be read, or its header is damaged.
    """

    def __init__(self, file: StoredFile):
        self._file, self.source = file, file.url
        self._header, self._start = _header_of(file)
        try:
            self.shapes = {name: _checked(each) for name, each in self._header.items()}
            ends = [self._start + each["data_offsets"][1] for each in self._header.values()]
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(file, f"its header makes no sense ({error!r})") from None
        if ends and max(ends) > file.size:
            raise _damaged(file, f"its tensors would take {max(ends)} bytes, it has {file.size}")

    def dtype(self, name: str) -> str:
        """How a tensor is stored, as the format names it."""
        return self._header[name]["dtype"]

    def read(self, name: str, part: Slices = ()) -> np.ndarray:
        """A tensor or a part of it; complete lines are read.

        Raises:
          CheckpointError: the store fails, or the file was changed.
        """
        shape, dtype = self.shapes[name], _NUMPY[self.dtype(name)]
        if not shape or math.prod(shape) * dtype.itemsize <= _MAX_SMALL_BYTES:
            return np.frombuffer(self.small[name], dtype).reshape(shape)[part]
        *outer, width = shape
        rows, columns = part[: len(outer)], (part[len(outer) :] or (slice(None),))[0]
        lines = np.arange(math.prod(outer)).reshape(outer)[rows]
        array = np.empty((lines.size, len(range(width)[columns])), dtype)
        start = self._start + self._header[name]["data_offsets"][0]
        size = width * dtype.itemsize

        def fetch(block: tuple[int, int, int]) -> None:
            to, first, count = block
            data = self._file.read(start + first * size, start + (first + count) * size)
            array[to : to + count] = np.frombuffer(data, dtype).reshape(count, width)[:, columns]

        with ThreadPoolExecutor(bucket.AT_ONCE) as pool:
            list(pool.map(fetch, _blocks(lines.ravel(), max(1, bucket.BLOCK // size))))
        return array.reshape(*lines.shape, array.shape[1])

    @cached_property
    def small(self) -> dict[str, bytes]:
        """The bytes of all small tensors."""
        places = {
            name: each["data_offsets"]
            for name, each in self._header.items()
            if each["data_offsets"][1] - each["data_offsets"][0] <= _MAX_SMALL_BYTES
        }

        def fetch(place: list[int]) -> bytes:
            start, stop = (self._start + each for each in place)
            return self._file.read(start, stop) if stop > start else b""

        with ThreadPoolExecutor(bucket.AT_ONCE) as pool:
            return dict(zip(places, pool.map(fetch, places.values()), strict=True))


def _blocks(lines: np.ndarray, max_lines: int) -> Iterator[tuple[int, int, int]]:
    """Runs of neighbouring lines: where they go, the first one, and how many."""
    breaks = np.flatnonzero(np.diff(lines) != 1) + 1
    for run in np.split(np.arange(lines.size), breaks):
        for at in range(0, run.size, max_lines):
            yield int(run[at]), int(lines[run[at]]), min(max_lines, run.size - at)


def _header_of(file: StoredFile) -> tuple[dict, int]:
    """The header, and where the tensors begin."""
    first = file.read(0, min(_FIRST_BYTES, file.size)) if file.size else b""
    length = int.from_bytes(first[:8], "little")
    if len(first) < 8 or length > min(_MAX_HEADER_BYTES, file.size - 8):
        raise _damaged(file, f"its header would take {length} bytes")
    if length + 8 > len(first):
        first += file.read(len(first), length + 8)
    try:
        header = json.loads(first[8 : length + 8])
    except (RecursionError, ValueError) as error:
        raise _damaged(file, f"its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise _damaged(file, "its header is not a JSON object")
    header.pop("__metadata__", None)
    return header, length + 8


def _checked(entry: dict) -> tuple[int, ...]:
    """The shape in a tensor's entry, which must agree with its bytes."""
    shape, (start, stop) = tuple(entry["shape"]), entry["data_offsets"]
    numbers = (*shape, start, stop)
    sizes = all(type(each) is int and each >= 0 for each in numbers)
    if not sizes or start > stop or len(shape) > _MAX_AXES:
        raise ValueError(f"{numbers} are not valid sizes")
    dtype = _NUMPY.get(entry["dtype"])
    if dtype is not None and math.prod(shape) * dtype.itemsize != stop - start:
        raise ValueError(f"{stop - start} bytes are not {entry['dtype']} of shape {shape}")
    return shape


def _damaged(file: StoredFile, why: str) -> CheckpointError:
    return CheckpointError(f"{file.url} is truncated or damaged: {why}. Upload it again.")
