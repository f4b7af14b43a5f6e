"""The safetensors files of a model: one, or shards listed in an index, on a disk or in a bucket."""

import math
from pathlib import Path, PurePath

import numpy as np
from safetensors import SafetensorError, safe_open

from spec_jax.checkpoints.bucket import weights_in
from spec_jax.checkpoints.files import damaged, read_json
from spec_jax.checkpoints.safetensors_ranges import RangedFile
from spec_jax.errors import CheckpointError
from spec_jax.models.family import Slices, Stored

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Endings of weight files that run code when opened."""

_DTYPES: dict[str, Stored] = {
    "F64": "float32",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
}


class SafetensorsFiles:
    """All tensors of a directory's safetensors files; parts of them can be read separately.

    Attributes:
      path: the directory; `fetch_from_bucket` makes one for a folder of a bucket.
      shapes: shape of every tensor; matrices are [out, in].

    Raises:
      CheckpointError: a file is missing, truncated or damaged, or lacks what the index promises; or
        the index names a file outside of the directory.
    """

    def __init__(self, path: Path):
        self.path = path
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, _LocalFile | RangedFile] = {}
        self.bucket = weights_in(path)
        index = path / "model.safetensors.index.json"
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise damaged(index, "it has no 'weight_map'")
            for name, entry in weight_map.items():
                _check_inside(index, name, entry)
            files = sorted(set(weight_map.values()))
        elif self._has("model.safetensors"):
            weight_map, files = {}, ["model.safetensors"]
        else:
            raise CheckpointError(_no_weights(path))
        for file in files:
            self._open(file)
        for name, shard in weight_map.items():
            if name not in self.shapes:
                raise CheckpointError(
                    f"{path / shard} lacks tensor {name!r}, which {index.name} says it holds. "
                    "Download both again."
                )

    def _has(self, file: str) -> bool:
        return (self.path / file).is_file() if self.bucket is None else file in self.bucket

    def _open(self, file: str) -> None:
        if not self._has(file):
            raise CheckpointError(
                f"{self.path / file} is missing, but the index lists it. Download it."
            )
        if self.bucket is None:
            opened = _LocalFile(self.path / file)
        else:
            opened = RangedFile(self.bucket[file])
        for name, shape in opened.shapes.items():
            self._places[name] = opened
            self.shapes[name] = shape

    @property
    def stored(self) -> Stored:
        """How the largest tensor is stored."""
        name = max(self.shapes, key=lambda name: math.prod(self.shapes[name]))
        return _DTYPES.get(self._places[name].dtype(name), "float32")

    def read(self, name: str, part: Slices = ()) -> np.ndarray:
        """A tensor, or a part of it, in the file's own floating-point dtype.

        Raises:
          CheckpointError: its dtype is not float64, float32, float16 or bfloat16.
        """
        file = self._places[name]
        if (dtype := file.dtype(name)) not in _DTYPES:
            raise CheckpointError(
                f"{file.source}: tensor {name!r} is stored as {dtype}; supported: "
                f"{', '.join(_DTYPES)}."
            )
        return file.read(name, part)

    def read_quantized(self, name: str) -> None:
        """None: quantized safetensors files are not supported."""


class _LocalFile:
    """The tensors of one file on a disk."""

    def __init__(self, path: Path):
        self.source = path
        self._dtypes: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        try:
            with safe_open(path, framework="numpy") as handle:
                for name in handle.keys():  # noqa: SIM118 (a handle is not a mapping)
                    tensor = handle.get_slice(name)
                    self.shapes[name] = tuple(tensor.get_shape())
                    self._dtypes[name] = tensor.get_dtype()
        except SafetensorError as error:
            raise damaged(path, str(error)) from None

    def dtype(self, name: str) -> str:
        """How a tensor is stored, as the format names it."""
        return self._dtypes[name]

    def read(self, name: str, part: Slices) -> np.ndarray:
        """A tensor, or a part of it."""
        # Opened anew each time: pages of a file that stays mapped count as this process's memory.
        with safe_open(self.source, framework="numpy") as handle:
            return handle.get_slice(name)[part] if part else handle.get_tensor(name)


def _check_inside(index: Path, name: str, entry: object) -> None:
    """Refuses a file outside the directory; it follows links in it, which hub caches have."""
    file = PurePath(entry) if isinstance(entry, str) else None
    if file is None or file.is_absolute() or ".." in file.parts:
        raise CheckpointError(
            f"{index} says that tensor {name!r} is in {entry!r}; give a file of the directory "
            f"{index.parent}, or download the index again from a source you trust."
        )


def _no_weights(path: Path) -> str:
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLES)
    if pickles:
        return (
            f"{path} holds its weights as {pickles[0]}, a pickle, which spec-jax does not open "
            "because unpickling can run code; convert it to model.safetensors."
        )
    return (
        f"{path} has neither model.safetensors nor model.safetensors.index.json. Is it a Hugging "
        "Face model directory?"
    )
