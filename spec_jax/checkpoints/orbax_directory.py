"""spec-jax's own directories: weights that Orbax writes and reads in parts, on any mesh.

`spec_jax.json` holds the model's shape and the settings that a tokenizer.json lacks,
`tokenizer.json` the tokenizer, and `weights/` an Orbax checkpoint of the parameters by name.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tokenizers
from jax.sharding import SingleDeviceSharding

from spec_jax import distributed
from spec_jax.checkpoints.files import damaged, read_json
from spec_jax.checkpoints.packing import Packing
from spec_jax.checkpoints.weights import pack_model
from spec_jax.errors import CheckpointError
from spec_jax.models.config import (
    Experts,
    LongRopeScaling,
    RopeScaling,
    TransformerConfig,
    YarnScaling,
)
from spec_jax.models.model import Model
from spec_jax.sharding import Placement
from spec_jax.text.tokenizer import ChatTemplate, Tokenizer

MANIFEST = "spec_jax.json"
_VERSION = 1


def save_directory(path: Path, model: Model, tokenizer: Tokenizer) -> None:
    """Writes a model and its tokenizer; all processes of a run call it, and each writes its part.

    Raises:
      CheckpointError: the path exists already.
    """
    taken = path.exists() and (not path.is_dir() or any(path.iterdir()))
    # All processes have checked the path before any of them writes.
    distributed.agree({"what it finds at the output": taken})
    if taken:
        raise CheckpointError(f"{path} exists; choose a new directory, nothing is overwritten.")
    from orbax.checkpoint import v1 as ocp  # takes a second to import

    ocp.save(str(path.absolute() / "weights"), model.weights)
    if jax.process_index() > 0:
        return
    tokenizer.save(path / "tokenizer.json")
    template = tokenizer.chat_template
    manifest = {
        "version": _VERSION,
        "config": dataclasses.asdict(model.config),
        "eos_token_ids": list(tokenizer.eos_token_ids),
        "bos_token_id": tokenizer.bos_token_id,
        "chat_template": template and dataclasses.asdict(template),
    }
    # Written last, so that a directory that has it is complete.
    (path / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def load_directory(
    path: Path,
    dtype: str,
    packing: Packing,
    place: Callable[[TransformerConfig], Placement | None],
) -> tuple[Model, Tokenizer, Packing]:
    """Reads a directory that `save_directory` wrote on any mesh; each device reads its own part.

    Raises:
      CheckpointError: it is damaged, or written by a newer spec-jax.
    """
    config, manifest = read_manifest(path)
    try:
        template = manifest["chat_template"]
        tokenizer = Tokenizer(
            tokenizers.Tokenizer.from_file(str(path / "tokenizer.json")),
            eos_token_ids=manifest["eos_token_ids"],
            bos_token_id=manifest["bos_token_id"],
            chat_template=template and ChatTemplate(**template),
        )
    except Exception as error:  # tokenizers raises plain Exceptions
        raise damaged(path / MANIFEST, f"{type(error).__name__}: {error}") from error
    model, packing = _restore(path / "weights", config, dtype, packing, place(config))
    return model, tokenizer, packing


def read_manifest(path: Path) -> tuple[TransformerConfig, dict[str, Any]]:
    """The model's shape, and the contents of a directory's `spec_jax.json`.

    Raises:
      CheckpointError: it is damaged, or written by a newer spec-jax.
    """
    manifest = read_json(path / MANIFEST)
    if manifest.get("version") != _VERSION:
        raise CheckpointError(
            f"{path / MANIFEST} is of version {manifest.get('version')!r}; this spec-jax reads "
            f"{_VERSION}. Update spec-jax, or save the model again."
        )
    try:
        return _shape(manifest["config"]), manifest
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(path / MANIFEST, f"{type(error).__name__}: {error}") from error


def _shape(found: dict[str, Any]) -> TransformerConfig:
    """The shape that `dataclasses.asdict` and JSON made this of."""
    shape = _tuples(found)
    if scaling := shape["rope_scaling"]:
        (kind,) = (
            kind
            for kind in (RopeScaling, YarnScaling, LongRopeScaling)
            if {field.name for field in dataclasses.fields(kind)} == set(scaling)
        )
        shape["rope_scaling"] = kind(**_tuples(scaling))
    if experts := shape.get("experts"):
        shape["experts"] = Experts(**_tuples(experts))
    if encoder := shape.get("encoder"):
        shape["encoder"] = _shape(encoder)
    return TransformerConfig(**shape)


def _tuples(found: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(each) if isinstance(each, list) else each for name, each in found.items()}


def _restore(
    path: Path,
    config: TransformerConfig,
    dtype: str,
    packing: Packing,
    placement: Placement | None,
) -> tuple[Model, Packing]:
    from orbax.checkpoint import v1 as ocp

    try:
        stored = ocp.metadata(str(path.absolute())).metadata
        kind = jnp.dtype(max(stored.values(), key=lambda array: math.prod(array.shape)).dtype)
        dtype, packing = packing.settled(dtype, "bfloat16" if kind == jnp.bfloat16 else "float32")
        model = Model.abstract(config, dtype=dtype, placement=placement)
        wanted = model.weights
        if placement is None:  # not on the devices that saved it
            here = SingleDeviceSharding(jax.devices()[0])
            wanted = {name: leaf.update(sharding=here) for name, leaf in wanted.items()}
        shapes = {name: tuple(array.shape) for name, array in stored.items()}
        if shapes != {name: leaf.shape for name, leaf in wanted.items()}:
            raise ValueError(f"its arrays are not those of {MANIFEST}")
        found = ocp.load(str(path.absolute()), wanted)
    except Exception as error:  # what TensorStore raises has no common type
        raise CheckpointError(f"{path} is damaged: Orbax cannot restore it ({error}).") from error
    return pack_model(model.with_weights(found), packing), packing
