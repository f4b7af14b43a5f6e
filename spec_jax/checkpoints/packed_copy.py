"""Copies of packed weights on disk, which later processes map into memory as they are."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import mmap
import os
import shutil
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import jax
import ml_dtypes
import numpy as np

from spec_jax.checkpoints.checksums import sum_of
from spec_jax.checkpoints.packing import Packing
from spec_jax.config import cache_directory
from spec_jax.files import PARTIAL, new_file, replace_text
from spec_jax.kernels import PackedWeight, Weight
from spec_jax.sharding import Placement

MAX_BYTES = 8 << 30
"""Limit of all copies in bytes; the copies used last stay."""
MIN_BYTES = 32 << 20
"""Smaller models are packed in no time."""
_ALIGNMENT = 64
"""Where XLA takes host memory as it is, instead of copying it."""
_ENDINGS = ".weights", ".json"
_CODE = "checkpoints", "kernels", "models"
"""The packages that decide what packed weights are."""


@dataclasses.dataclass(frozen=True)
class PackedCopy:
    """The copy of a model's weights in one form, as this code packs them.

    Attributes:
      key: the name of its files: another form, another code or another file has another one.
    """

    key: str

    @classmethod
    def of(cls, path: Path, dtype: str, packing: Packing, placement: Placement) -> Self | None:
        """The copy of a model's quantized weights for native code; None for other weights.

        Args:
          path: the model's file, or a directory whose files are its weights and settings.
          dtype: the dtype of weights that are not quantized.
          packing: the form of the others.
          placement: where they go.
        """
        if not packing.native or packing.quantization == "none" or placement.mesh is not None:
            return None
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        times = [(each.name, *_times(each)) for each in files if each.is_file()]
        text = repr((_code(), str(path.resolve()), times, dtype, packing))
        return cls(hashlib.sha256(text.encode()).hexdigest()[:24])

    def read(self) -> dict[str, Weight] | None:
        """The weights, mapped into memory; None if there is no copy, or it is damaged."""
        data, _ = self._files
        try:
            if content := self._content():
                return _mapped(data, content["weights"])
        except OSError:  # there is none, or this user may not read it
            return None
        warnings.warn(
            f"the copy of packed weights {data} was damaged, and is made again",
            RuntimeWarning,
            stacklevel=2,
        )
        self._remove()
        return None

    def _content(self) -> dict[str, Any]:
        """What the manifest says of the data; nothing if one of the two is damaged."""
        data, manifest = self._files
        digest, _, text = manifest.read_bytes().partition(b"\n")
        if digest.decode(errors="replace") != _digest(text):
            return {}
        content, times = json.loads(text), _times(data)
        if content["times"] != times:
            if content["sha256"] != sum_of(data):
                return {}
            content["times"] = times  # it was only touched
            self._write_manifest(content)
        return content

    def write(self, weights: Mapping[str, Weight]) -> None:
        """Keeps the weights, if there is room; older copies make room."""
        size = sum(each.nbytes for each in jax.tree.leaves(dict(weights)))
        if not MIN_BYTES <= size <= MAX_BYTES:
            return
        data, _ = self._files
        with contextlib.suppress(OSError):
            data.parent.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(data.parent).free < 2 * size:
                return
            _make_room(data.parent, MAX_BYTES - size)
            entries: dict[str, Any] = {}
            with new_file(data) as partial, partial.open("wb") as file:
                for name, weight in weights.items():
                    entries[name] = _entry(weight, file)
            content = {"times": _times(data), "sha256": sum_of(data), "weights": entries}
            self._write_manifest(content)

    @property
    def _files(self) -> tuple[Path, Path]:
        folder = cache_directory() / "packed"
        data, manifest = (folder / f"{self.key}{ending}" for ending in _ENDINGS)
        return data, manifest

    def _write_manifest(self, content: dict[str, Any]) -> None:
        text = json.dumps(content)
        replace_text(self._files[1], _digest(text.encode()) + "\n" + text)

    def _remove(self) -> None:
        for file in self._files:
            with contextlib.suppress(OSError):
                file.unlink()


def _entry(weight: Weight, file: Any) -> dict[str, Any]:
    """Writes a weight's arrays; returns what `_weight` needs to find them."""
    if not isinstance(weight, PackedWeight):
        assert isinstance(weight, jax.Array)
        return {"array": _write(weight, file)}
    entry: dict[str, Any] = {}
    for field in dataclasses.fields(weight):
        value = getattr(weight, field.name)
        entry[field.name] = _write(value, file) if isinstance(value, jax.Array) else value
    return entry


def _write(array: jax.Array, file: Any) -> list[Any]:
    file.seek(-file.tell() % _ALIGNMENT, os.SEEK_CUR)
    begin, numbers = file.tell(), np.asarray(array)
    file.write(np.ascontiguousarray(numbers).reshape(-1).view(np.uint8).data)
    return [numbers.dtype.name, list(numbers.shape), begin]


def _mapped(data: Path, entries: Mapping[str, Any]) -> dict[str, Weight]:
    """The weights of a copy's entries; the system reads their pages when they are first used."""
    with contextlib.suppress(OSError):  # the time of its last use
        os.utime(data, ns=(time.time_ns(), data.stat().st_mtime_ns))
    with data.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    mapped.madvise(mmap.MADV_WILLNEED)
    numbers = np.frombuffer(mapped, np.uint8)
    return {name: _weight(entry, numbers) for name, entry in entries.items()}


def _weight(entry: dict[str, Any], numbers: np.ndarray) -> Weight:
    """The weight of an entry, as views of the copy's bytes."""

    def part(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        if not isinstance(value[0], str):
            return tuple(value)
        name, shape, begin = value
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        count = int(np.prod(shape)) * dtype.itemsize
        return jax.device_put(numbers[begin : begin + count].view(dtype).reshape(shape))

    parts = {name: part(value) for name, value in entry.items()}
    return parts["array"] if "array" in parts else PackedWeight(**parts)


def _make_room(folder: Path, max_bytes: int) -> None:
    """Removes the copies that were not used for longest, and what interrupted processes left."""
    files = [(each, each.stat()) for each in folder.iterdir()]
    size = sum(stat.st_size for _, stat in files)
    # Interrupted ones first, whatever their time.
    for file, stat in sorted(files, key=lambda each: (each[0].suffix != PARTIAL, each[1].st_atime)):
        if size <= max_bytes:
            return
        size -= stat.st_size
        file.unlink(missing_ok=True)


def _times(file: Path) -> list[int]:
    """Differs for a file that was touched."""
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@functools.cache
def _code() -> str:
    """Identifies the code that packs weights."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(file for each in _CODE for file in (root / each).rglob("*.*")):
        if file.suffix in (".py", ".cpp", ".h"):
            digest.update(file.read_bytes())
    return digest.hexdigest()
