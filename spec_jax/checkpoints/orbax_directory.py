"""spec-jax's own directories: weights that Orbax writes and reads in parts, on any mesh.

`spec_jax.json` holds the model's shape and the settings that a tokenizer.json lacks,
`tokenizer.json` the tokenizer, and `weights/` an Orbax checkpoint of the parameters by name. A
quantized matrix is stored as its values, scales and minima, outputs first. The weights of a
directory in a bucket stay in the bucket.
"""

import contextlib
import dataclasses
import json
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import tokenizers
from jax.sharding import SingleDeviceSharding

from spec_jax.checkpoints.files import damaged, read_json
from spec_jax.checkpoints.orbax_arrays import OrbaxArrays
from spec_jax.checkpoints.packing import Packing
from spec_jax.checkpoints.weights import StoredModel, StoredWeights, to_rows
from spec_jax.config import AUTO
from spec_jax.config.explain import explain
from spec_jax.errors import CheckpointError, ConfigError, SpecJaxError, extra, raising_panics
from spec_jax.kernels import Quantized, Weight
from spec_jax.models.config import Experts, TransformerConfig
from spec_jax.models.model import Model
from spec_jax.models.rotary import LongRopeScaling, RopeScaling, YarnScaling
from spec_jax.sharding import Placement
from spec_jax.text.chat_template import ChatTemplate
from spec_jax.text.tokenizer import Tokenizer

MANIFEST = "spec_jax.json"
_VERSION = 4
_READABLE = (2, 3, 4)
"""Version 2 described layers by rules; until version 4 quantized weights had 4 or 8 bits."""
_READ_AT_ONCE = 1 << 30
"""Bytes of weights that are read or written together."""
_CHUNK = 4 << 20
"""Bytes of the largest chunk of an array; chunks are always read completely."""


def write_directory(path: Path, model: StoredModel) -> None:
    """Writes a model; all processes of a run call it, and each writes its part.

    Quantized weights are written by the first process, since their groups depend on the mesh.

    Args:
      path: an empty directory.
      model: the model, read while it is written.

    Raises:
      OSError: Orbax cannot write it.
    """
    ocp = _orbax()
    weights, target = model.weights, str(path.absolute() / "weights")
    context = ocp.Context()
    context.array.saving.storage_options.chunk_byte_size = _CHUNK
    for names in _batches(weights.leaves):
        quantized = [name for name in names if model.packing.of(name, weights.leaves[name].shape)]
        arrays: dict[str, Any] = weights.read([name for name in names if name not in quantized])
        for name in quantized:
            rows = weights.read_rows(name)
            if isinstance(rows, Quantized):
                arrays[name] = rows.arrays | {"bits": np.array([rows.bits], np.int32)}
            else:  # a GGUF file may hold some matrices as plain numbers
                arrays[name] = np.ascontiguousarray(rows.swapaxes(-1, -2))
        with context, _writing():
            ocp.partial.save(target, arrays)
    with _writing():
        ocp.partial.finalize(target)
    if jax.process_index() > 0:
        return
    model.tokenizer.save(path / "tokenizer.json")
    template = model.tokenizer.chat_template
    manifest = {
        "version": _VERSION,
        "config": dataclasses.asdict(model.config),
        "quantization": model.packing.quantization,
        "eos_token_ids": list(model.tokenizer.eos_token_ids),
        "bos_token_id": model.tokenizer.bos_token_id,
        "chat_template": template and dataclasses.asdict(template),
    }
    (path / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def check_path(path: Path) -> None:
    """Refuses a path under which Orbax writes what it cannot read: it searches by patterns.

    Raises:
      ConfigError: the path has a character that means something in a pattern, or Orbax is missing.
    """
    for sign in _PATTERN_SIGNS:
        if sign in str(path.absolute()):
            raise ConfigError(
                f"the path {path.absolute()} holds {sign!r}, under which Orbax cannot find its own "
                "files; choose a directory whose path has none of " + " ".join(_PATTERN_SIGNS) + "."
            )
    _orbax()


def open_directory(
    path: Path,
    dtype: str,
    packing: Packing,
    place: Callable[[TransformerConfig], Placement],
) -> StoredModel:
    """Opens a directory that `write_directory` wrote on any mesh.

    Raises:
      CheckpointError: it is damaged, or written by another version of spec-jax.
      ConfigError: its weights are quantized, and another quantization is asked for.
    """
    config, manifest = read_manifest(path)
    try:
        template = manifest["chat_template"]
        with raising_panics():
            backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        tokenizer = Tokenizer(
            backend,
            eos_token_ids=manifest["eos_token_ids"],
            bos_token_id=manifest["bos_token_id"],
            chat_template=template and ChatTemplate(**template),
        )
        quantization = Packing(manifest["quantization"]).quantization
    except Exception as error:  # tokenizers raises plain Exceptions
        raise damaged(path / MANIFEST, f"{type(error).__name__}: {error}") from error
    if quantization != "none" and packing.quantization not in (AUTO, "none", quantization):
        raise ConfigError(
            f"quantization is {packing.quantization!r}, but {path} holds weights of "
            f"{quantization}; use {quantization}, none, or the model it was made from, since "
            "rounding twice loses more."
        )
    placement = place(config)
    arrays = OrbaxArrays(path)
    if packing.quantization == AUTO and quantization != "none":
        packing = dataclasses.replace(packing, quantization=quantization)
    try:
        plain = [each for each in arrays.stored.values() if not isinstance(each, Mapping)]
        kind = max(plain, key=lambda array: math.prod(array.shape)).dtype
        dtype, packing = packing.settled(dtype, "bfloat16" if kind == jnp.bfloat16 else "float32")
        weights = _OrbaxWeights(arrays, config, dtype, packing, placement)
    except SpecJaxError:
        raise
    except (LookupError, ValueError) as error:
        raise CheckpointError(
            f"{arrays.source} is damaged ({error}). Copy it again, or convert the model again."
        ) from error
    return StoredModel(config, tokenizer, dtype, packing, weights, placement)


def read_manifest(path: Path) -> tuple[TransformerConfig, dict[str, Any]]:
    """The model's shape, and the contents of a directory's `spec_jax.json`.

    Raises:
      CheckpointError: it is damaged, or written by another version of spec-jax.
    """
    manifest = read_json(path / MANIFEST)
    if manifest.get("version") not in _READABLE:
        raise CheckpointError(
            f"{path / MANIFEST} is of version {manifest.get('version')!r}; this spec-jax reads "
            f"{_VERSION}. Update spec-jax, or convert the model again."
        )
    try:
        return _shape(manifest["config"]), manifest
    except pydantic.ValidationError as error:
        raise damaged(path / MANIFEST, explain(error)) from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(path / MANIFEST, f"{type(error).__name__}: {error}") from error


_CONFIG = pydantic.TypeAdapter(TransformerConfig)
_SCALING = pydantic.TypeAdapter(RopeScaling | YarnScaling | LongRopeScaling | None)


def _shape(fields: dict[str, Any]) -> TransformerConfig:
    """The inverse of `dataclasses.asdict` and JSON."""
    text = json.dumps(fields).replace('"whole":', '"truncate":')  # which older versions wrote
    if "layers" in fields:
        return _CONFIG.validate_json(text, strict=True, extra="forbid")
    fields = json.loads(text)
    shape = {name: tuple(each) if isinstance(each, list) else each for name, each in fields.items()}
    shape["rope_scaling"] = _SCALING.validate_python(fields["rope_scaling"], extra="forbid")
    if experts := dict(fields.get("experts") or {}):
        shape["dense_layers"] = tuple(experts.pop("dense_layers", ()))
        shape["experts"] = Experts(**experts)
    if encoder := fields.get("encoder"):
        shape["encoder"] = _shape(encoder)
    return TransformerConfig.of(**shape)


class _OrbaxWeights(StoredWeights):
    """The weights of a directory; each device reads its part of arrays that are not quantized."""

    def __init__(
        self,
        arrays: OrbaxArrays,
        config: TransformerConfig,
        dtype: str,
        packing: Packing,
        placement: Placement,
    ):
        super().__init__(Model.abstract(config, dtype=dtype, placement=placement).weights, packing)
        self._arrays, self._stored = arrays, arrays.stored
        shapes = {
            name: tuple(each["values"].shape[:-2]) + tuple(each["values"].shape[:-3:-1])
            if isinstance(each, Mapping)
            else tuple(each.shape)
            for name, each in self._stored.items()
        }
        if shapes != {name: leaf.shape for name, leaf in self.leaves.items()}:
            raise ValueError(f"its arrays differ from {MANIFEST}")

    def read(self, names: Collection[str]) -> dict[str, Weight]:
        """Weights on their devices."""
        weights: dict[str, Weight] = {}
        for batch in _batches({name: self.leaves[name] for name in names}):
            weights |= self._restore([name for name in batch if not self._is_packed(name)])
            for name in batch:
                if name not in weights:
                    packing = self._packing.of(name, self.leaves[name].shape)
                    weights[name] = packing.pack(self.read_rows(name), self.leaves[name])
        return weights

    def _is_packed(self, name: str) -> bool:
        """Whether a weight is not a plain array on the disk or in memory."""
        packing = self._packing.of(name, self.leaves[name].shape)
        return bool(packing) or isinstance(self._stored[name], Mapping)

    def _array(self, name: str) -> Any:
        return self._restore([name])[name]

    def _rows(self, name: str, packing: Packing) -> np.ndarray | Quantized:
        array = self._array(name)
        if not isinstance(array, Mapping):
            return to_rows(array)
        parts = {"minima": None, **array}
        (bits,) = parts.pop("bits", [4 if array["values"].dtype == np.uint8 else 8])
        if bits not in (4, 5, 6, 8):
            raise CheckpointError(
                f"{self._arrays.source} is damaged ({name} has values of {bits} bits). Copy it "
                "again, or convert the model again."
            )
        rows = Quantized(bits=int(bits), **parts)
        return rows.dequantize() if packing.quantization == "none" else rows

    def _restore(self, names: Collection[str]) -> dict[str, Any]:
        """The stored arrays of these names on devices; quantized matrices in host memory."""
        if not names:
            return {}
        here = SingleDeviceSharding(jax.devices()[0])  # not the devices that wrote it
        leaves: dict[str, Any] = {}
        for name in names:
            stored, leaf = self._stored[name], self.leaves[name]
            leaves[name] = (
                stored
                if isinstance(stored, Mapping)
                else leaf.update(sharding=leaf.sharding or here)
            )
        return self._arrays.load(leaves)


_PATTERN_SIGNS = "[*?\\"


def _orbax() -> Any:
    """Orbax, which takes a second to import, without the errors that it logs and raises too."""
    with extra("orbax"):
        from orbax.checkpoint import v1

    log = logging.getLogger("absl")
    if _not_raised not in log.filters:
        log.addFilter(_not_raised)
    return v1


def _not_raised(record: logging.LogRecord) -> bool:
    return "raised an exception" not in record.getMessage()


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Raises errors of Orbax and TensorStore, which have no common type, as OSErrors."""
    try:
        yield
    except Exception as error:
        raise OSError(str(error)) from error


def _batches(leaves: Mapping[str, jax.ShapeDtypeStruct]) -> Collection[list[str]]:
    """Names whose weights are `_READ_AT_ONCE` bytes together, or a single one; the largest first.

    Temporary copies of the largest are then freed before the others take memory.
    """
    from huggingface_hub import split_state_dict_into_shards_factory  # slow to import

    batches = split_state_dict_into_shards_factory(
        dict(sorted(leaves.items(), key=lambda item: -item[1].size)),
        get_storage_size=lambda leaf: leaf.size * leaf.dtype.itemsize,
        filename_pattern="{suffix}",
        max_shard_size=_READ_AT_ONCE,
    )
    return batches.filename_to_tensors.values()
