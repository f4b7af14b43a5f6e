"""The arrays of an Orbax checkpoint in an object store, of which TensorStore reads byte ranges."""

import contextlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import jax
import numpy as np

from spec_jax.checkpoints.bucket import DATABASE, StoredFile, first_line, kvstore, unreadable
from spec_jax.errors import CheckpointError, extra
from spec_jax.models.family import Slices

_ARRAY = "/zarr.json"
_QUANTIZED = ("values", "scales", "minima")
_CACHE = {"cache_pool#nodes": {"total_bytes_limit": 64 << 20}}
"""For the nodes of the database's tree, which every reading of an array goes through."""
_NO_ACCESS = ("PERMISSION_DENIED", "UNAUTHENTICATED", "UNAVAILABLE", "DEADLINE_EXCEEDED")
"""What TensorStore's errors begin with if the store or the network refuses."""


class BucketArrays:
    """The arrays of one checkpoint.

    Args:
      files: the checkpoint's files by their paths in it, one of which is the database's.

    Attributes:
      source: its address.
    """

    def __init__(self, files: Mapping[str, StoredFile]):
        # Each process that wrote has a database too, deeper; this one leads to all of them.
        manifest = min((name for name in files if name.endswith(DATABASE)), key=len)
        self._address = files[manifest].url.removesuffix(DATABASE)
        self.source = self._address.rstrip("/")

    @cached_property
    def stored(self) -> Mapping[str, Any]:
        """Shape and dtype by name: of an array, or of each part of a quantized matrix.

        Raises:
          CheckpointError: the store fails, or a file is missing or damaged.
          ConfigError: TensorStore is not installed.
        """
        stored: dict[str, Any] = {}
        for name, array in self._arrays.items():
            leaf = jax.ShapeDtypeStruct(array.shape, array.dtype.numpy_dtype)
            matrix, _, part = name.rpartition(".")
            if part in _QUANTIZED:
                stored.setdefault(matrix, {})[part] = leaf
            else:
                stored[name] = leaf
        return stored

    def load(self, leaves: Mapping[str, Any]) -> dict[str, Any]:
        """Arrays on their devices, each process with its part; quantized matrices in host memory.

        Args:
          leaves: by name, the shape, dtype and sharding of an array; or a mapping with the names
            of the parts of a quantized matrix.

        Raises:
          CheckpointError: the store fails, or a file is missing, damaged or was changed.
        """
        parts: dict[tuple[str, str], Slices] = {}  # slices can be keys in Python 3.12 only
        for name, each in leaves.items():
            if isinstance(each, Mapping):
                parts |= {(f"{name}.{key}", ""): () for key in each}
            else:
                indices = each.sharding.addressable_devices_indices_map(each.shape).values()
                parts |= {(name, str(index)): index for index in indices}
        with self._explaining():
            reads = {key: self._arrays[key[0]][part].read() for key, part in parts.items()}
            read = {key: each.result() for key, each in reads.items()}

        def array(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            def part(index: Slices | None) -> np.ndarray:
                return read[name, str(index)].astype(leaf.dtype, copy=False)

            return jax.make_array_from_callback(leaf.shape, leaf.sharding, part, dtype=leaf.dtype)

        return {
            name: {key: read[f"{name}.{key}", ""] for key in each}
            if isinstance(each, Mapping)
            else array(name, each)
            for name, each in leaves.items()
        }

    @cached_property
    def _arrays(self) -> dict[str, Any]:
        """TensorStore's arrays by name."""
        with extra("orbax"):
            import tensorstore as ts
        database = {
            "driver": "ocdbt",
            "base": kvstore(self._address),
            "cache_pool": "cache_pool#nodes",
        }
        with self._explaining():
            context = ts.Context(_CACHE)
            keys = ts.KvStore.open(database, context=context).result().list().result()
            entries = [key.decode() for key in keys if key.decode().endswith(_ARRAY)]
            opened = {}
            for name in (entry.removesuffix(_ARRAY) for entry in entries):
                spec = {"driver": "zarr3", "kvstore": database | {"path": f"{name}/"}}
                spec |= {"fill_missing_data_reads": False, "recheck_cached_data": False}
                opened[name] = ts.open(spec, context=context, open=True, read=True)
            if not opened:
                raise ValueError("it holds no arrays")
            return {name: each.result() for name, each in opened.items()}

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Raises errors of TensorStore, which have no common type, as ours."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            if str(error).startswith(_NO_ACCESS):
                raise unreadable(self.source, error) from error
            raise CheckpointError(
                f"{self.source} is damaged, lacks a file, or was changed while it was read "
                f"({first_line(error)}). Upload the directory again, or start again when its "
                "upload has ended."
            ) from error
