"""The arrays of an Orbax checkpoint on a disk or in a bucket, of which TensorStore reads parts."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spec_jax.checkpoints.bucket import (
    DATABASE,
    first_line,
    is_url,
    kvstore,
    unreadable,
    weights_in,
)
from spec_jax.checkpoints.files import damaged
from spec_jax.errors import CheckpointError, extra
from spec_jax.kernels import Quantized
from spec_jax.models.family import Slices

_ARRAY = "/zarr.json"
_QUANTIZED = {field.name for field in dataclasses.fields(Quantized)}
_CACHE = {"cache_pool#nodes": {"total_bytes_limit": 64 << 20}}
"""For the nodes of the database's tree, which every reading of an array goes through."""
_NO_ACCESS = ("PERMISSION_DENIED", "UNAUTHENTICATED", "UNAVAILABLE", "DEADLINE_EXCEEDED")
"""What TensorStore's errors begin with if the store or the network refuses."""


class OrbaxArrays:
    """The arrays of one checkpoint.

    Args:
      path: the directory that holds it, or the copy of one in a bucket without its weights.

    Attributes:
      source: its path or address.
    """

    def __init__(self, path: Path):
        files = weights_in(path)
        if files is None:
            databases = [str(each) for each in (path.absolute() / "weights").rglob(DATABASE)]
        else:
            databases = [file.url for name, file in files.items() if name.endswith(DATABASE)]
        if not databases:
            raise damaged(path, f"weights/**/{DATABASE} is missing")
        # Each process that wrote has a database too, deeper; this one leads to all of them.
        self._address = min(databases, key=len).removesuffix(DATABASE)
        self.source = self._address.rstrip("/")

    @cached_property
    def stored(self) -> Mapping[str, Any]:
        """Shape and dtype by name: of an array, or of each part of a quantized matrix.

        Raises:
          CheckpointError: the disk or store fails, or a file is missing or damaged.
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
          CheckpointError: the disk or store fails, or a file is missing, damaged or was changed.
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
            if not is_url(self.source):
                raise CheckpointError(
                    f"{self.source} is damaged, so that its weights cannot be read "
                    f"({first_line(error)}). Copy it again, or convert the model again."
                ) from error
            if str(error).startswith(_NO_ACCESS):
                raise unreadable(self.source, error) from error
            raise CheckpointError(
                f"{self.source} is damaged, lacks a file, or was changed while it was read "
                f"({first_line(error)}). Upload the directory again, or start again when its "
                "upload has ended."
            ) from error
