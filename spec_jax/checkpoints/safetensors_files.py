"""The safetensors files of a Hugging Face directory: one, or shards listed in an index."""

import math
from pathlib import Path, PurePath

import numpy as np
from safetensors import SafetensorError, safe_open

from spec_jax.checkpoints.files import damaged, read_json
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
      path: the directory.
      shapes: shape of every tensor; matrices are [out, in].

    Raises:
      CheckpointError: a file is missing, truncated or damaged, or lacks what the index promises; or
        the index names a file outside of the directory.
    """

    def __init__(self, path: Path):
        self.path = path
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, Path] = {}
        index = path / "model.safetensors.index.json"
        single = path / "model.safetensors"
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise damaged(index, "it has no 'weight_map'")
            for name, entry in weight_map.items():
                _check_inside(index, name, entry)
            files = [path / name for name in sorted(set(weight_map.values()))]
        elif single.is_file():
            weight_map, files = {}, [single]
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

    def _open(self, file: Path) -> None:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing, but the index lists it. Download it.")
        try:
            handle = safe_open(file, framework="numpy")
        except SafetensorError as error:
            raise damaged(file, str(error)) from None
        for name in handle.keys():  # noqa: SIM118 (a handle is no mapping)
            self._places[name] = file
            self.shapes[name] = tuple(handle.get_slice(name).get_shape())

    @property
    def stored(self) -> Stored:
        """How the largest tensor is stored."""
        name = max(self.shapes, key=lambda name: math.prod(self.shapes[name]))
        with safe_open(self._places[name], framework="numpy") as handle:
            return _DTYPES.get(handle.get_slice(name).get_dtype(), "float32")

    def read(self, name: str, part: Slices = ()) -> np.ndarray:
        """A tensor, or a part of it, in the file's own floating-point dtype.

        Raises:
          CheckpointError: its dtype is not float64, float32, float16 or bfloat16.
        """
        file = self._places[name]
        # Opened anew each time: pages of a file that stays mapped count as this process's memory.
        with safe_open(file, framework="numpy") as handle:
            tensor = handle.get_slice(name)
            dtype = tensor.get_dtype()
            if dtype not in _DTYPES:
                raise CheckpointError(
                    f"{file}: tensor {name!r} is stored as {dtype}; supported: "
                    f"{', '.join(_DTYPES)}."
                )
            return tensor[part] if part else handle.get_tensor(name)

    def read_quantized(self, name: str) -> None:
        """No matrix: quantized safetensors files are not supported."""


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
