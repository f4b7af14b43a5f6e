"""The arrays of an Orbax checkpoint, read by ranges of bytes out of an object store.

Orbax keeps its arrays in one OCDBT database, a B+tree in files whose leaves name the bytes of each
value: the description of a Zarr array, or one of its chunks. TensorStore decodes them out of
memory. The bytes come as those of all files in a bucket do, so that credentials, retries and
messages are the same.
https://google.github.io/tensorstore/kvstore/ocdbt
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import host_memory
from spec_jax.checkpoints import bucket
from spec_jax.checkpoints.bucket import DATABASE, StoredFile
from spec_jax.errors import CheckpointError, extra
from spec_jax.models.family import Slices

_ARRAY = "/zarr.json"
_FEW_BITS = ("values", "scales", "minima")


class OcdbtArrays:
    """The arrays of one checkpoint; errors of TensorStore are the caller's to explain.

    Args:
      files: the checkpoint's files by their paths in it, one of which is the database's.

    Attributes:
      source: its address.
    """

    def __init__(self, files: Mapping[str, StoredFile]):
        # Each process that wrote has a database too, deeper; this one leads to all of them.
        manifest = min((name for name in files if name.endswith(DATABASE)), key=len)
        self._files, self._folder = files, manifest.removesuffix(DATABASE)
        self.source = files[manifest].url.removesuffix(f"/{DATABASE}")

    @cached_property
    def stored(self) -> Mapping[str, Any]:
        """Shape and dtype by name: of an array, or of each part of a matrix in few bits.

        Raises:
          CheckpointError: the store fails, or a file is missing.
          ConfigError: TensorStore is not installed.
        """
        found: dict[str, Any] = {}
        for name, array in self._arrays.items():
            matrix, _, part = name.rpartition(".")
            if part in _FEW_BITS:
                found.setdefault(matrix, {})[part] = array
            else:
                found[name] = array
        return found

    def load(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Arrays on their devices, of which each process reads its part; few bits in host memory.

        Args:
          wanted: by name, the shape, dtype and sharding of an array; or a mapping with the names
            of the parts of a matrix in few bits.

        Raises:
          CheckpointError: the store fails, or a file is missing or was changed.
        """
        parts: dict[tuple[str, str], Slices] = {}  # slices can be keys in Python 3.12 only
        for name, each in wanted.items():
            if isinstance(each, Mapping):
                parts |= {(f"{name}.{key}", ""): () for key in each}
            else:
                indices = each.sharding.addressable_devices_indices_map(each.shape).values()
                parts |= {(name, str(index)): index for index in indices}
        with host_memory.large_blocks_given_back():
            read = self._read(parts)

        def array(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            def part(index: Slices | None) -> np.ndarray:
                return read[name, str(index)].astype(leaf.dtype, copy=False)

            return jax.make_array_from_callback(leaf.shape, leaf.sharding, part, dtype=leaf.dtype)

        return {
            name: {key: read[f"{name}.{key}", ""] for key in each}
            if isinstance(each, Mapping)
            else array(name, each)
            for name, each in wanted.items()
        }

    def _read(self, parts: Mapping[tuple[str, str], Slices]) -> dict[tuple[str, str], np.ndarray]:
        """Parts of arrays by the arrays' names and the parts'; their chunks are read together."""
        ts = _tensorstore()
        keys = {
            key
            for (name, _), part in parts.items()
            for key in self._arrays[name].chunks_of(name, part)
        }
        context = ts.Context()  # whose memory both use
        memory = ts.KvStore.open("memory://", context=context).result()
        for key, data in zip(keys, _fetch(self._values[key] for key in keys), strict=True):
            memory[key] = data
        opened: dict[str, Any] = {}
        for name in {name for name, _ in parts}:
            memory[name + _ARRAY] = self._arrays[name].said
            spec = {"driver": "zarr3", "kvstore": {"driver": "memory", "path": f"{name}/"}}
            opened[name] = ts.open(spec, context=context).result()
        reads = {key: opened[key[0]][part].read() for key, part in parts.items()}
        return {key: each.result() for key, each in reads.items()}

    @cached_property
    def _arrays(self) -> dict[str, "_Array"]:
        """What is said of each array."""
        entries = {name: each for name, each in self._values.items() if name.endswith(_ARRAY)}
        return {
            name.removesuffix(_ARRAY): _Array.of(data)
            for name, data in zip(entries, _fetch(entries.values()), strict=True)
        }

    @cached_property
    def _values(self) -> dict[str, "_Value"]:
        """All values by key: the leaves of the tree."""
        manifest = self._file(DATABASE)
        (data,) = _fetch([_Range(manifest, 0, manifest.size)])
        newest = _dump(DATABASE, data)["versions"][-1]
        found: dict[str, _Value] = {}
        todo, seen = [(newest["root"]["location"], b"")], set()
        while todo:
            location, prefix = todo.pop()
            if location in seen:  # a damaged file may lead in circles
                raise ValueError("a node of its tree is there twice")
            seen.add(location)
            for entry in self._node(location)["entries"]:
                if "location" in entry:
                    todo.append((entry["location"], prefix + entry["subtree_common_prefix"]))
                elif "inline_value" in entry:
                    found[(prefix + entry["key"]).decode()] = entry["inline_value"]
                else:
                    found[(prefix + entry["key"]).decode()] = self._range(entry["indirect_value"])
        return found

    def _node(self, location: str) -> dict[str, Any]:
        kind, folder, name, _, size = location.split(":")
        (data,) = _fetch([self._range(location)])
        return _dump(folder + name, data, ":".join((kind, folder, name, "0", size)))

    def _range(self, location: str) -> "_Range":
        """The bytes at what OCDBT calls a location: `kind:folder:name:offset:size`."""
        _, folder, name, offset, size = location.split(":")
        file, start = self._file(folder + name), int(offset)
        stop = start + int(size)
        if stop > file.size:
            raise ValueError(f"{file.url} has {file.size} bytes, not {stop}")
        return _Range(file, start, stop)

    def _file(self, name: str) -> StoredFile:
        if self._folder + name not in self._files:
            raise CheckpointError(f"{self.source}/{name} is missing; upload the directory again.")
        return self._files[self._folder + name]


@dataclass(frozen=True)
class _Array:
    """How an array is stored.

    Attributes:
      shape: its shape.
      dtype: its dtype.
      chunk: the shape of what is read at a time.
      said: its `zarr.json`.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]
    said: bytes

    @classmethod
    def of(cls, said: bytes) -> Self:
        """The array of a `zarr.json`; one that makes no sense raises whatever Python does."""
        found = json.loads(said)
        shape, chunk = found["shape"], found["chunk_grid"]["configuration"]["chunk_shape"]
        if not all(0 < size <= whole for size, whole in zip(chunk, shape, strict=True)):
            raise ValueError(f"chunks of {chunk} are no parts of an array of {shape}")
        return cls(tuple(shape), jnp.dtype(found["data_type"]), tuple(chunk), said)

    def chunks_of(self, name: str, part: Slices) -> Iterator[str]:
        """The keys of the chunks that a part of the array needs."""
        ends = [each.indices(size)[:2] for each, size in zip(part, self.shape, strict=False)]
        ends += [(0, size) for size in self.shape[len(part) :]]
        axes = (
            range(start // size, -(-stop // size))
            for (start, stop), size in zip(ends, self.chunk, strict=True)
        )
        for cell in itertools.product(*axes):
            yield "/".join((name, "c", *map(str, cell)))


class _Range(NamedTuple):
    """Bytes start to stop - 1 of a file."""

    file: StoredFile
    start: int
    stop: int

    def blocks(self) -> list["_Range"]:
        """Parts of it, each for one request."""
        starts = range(self.start, self.stop, bucket.BLOCK)
        return [_Range(self.file, at, min(at + bucket.BLOCK, self.stop)) for at in starts]


_Value = bytes | _Range
"""A small value, or where a larger one is."""


def _fetch(values: Iterable[_Value]) -> list[bytes]:
    """Reads values, at once as far as a bucket is asked at once."""
    split = [[each] if isinstance(each, bytes) else each.blocks() for each in values]

    def read(each: _Value) -> bytes:
        return each if isinstance(each, bytes) else each.file.read(each.start, each.stop)

    with ThreadPoolExecutor(bucket.AT_ONCE) as pool:
        found = pool.map(read, itertools.chain.from_iterable(split))
        return [b"".join(itertools.islice(found, len(blocks))) for blocks in split]


def _dump(name: str, data: bytes, node: str | None = None) -> dict[str, Any]:
    """The contents of a node, or of the manifest, in the words of TensorStore."""
    ts = _tensorstore()
    memory = ts.KvStore.open("memory://").result()
    memory[name] = data
    return ts.ocdbt.dump(memory, node).result()


def _tensorstore() -> Any:
    with extra("orbax"):
        import tensorstore
    return tensorstore
