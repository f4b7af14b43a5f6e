"""Reads a model's shape without its weights."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_jax.checkpoints.ctranslate2_directory import MODEL, Ctranslate2Directory
from spec_jax.checkpoints.files import making_sense, read_json, reading
from spec_jax.checkpoints.gguf_file import GgufFile
from spec_jax.checkpoints.orbax_directory import MANIFEST, read_manifest
from spec_jax.checkpoints.packing import is_quantized
from spec_jax.checkpoints.recipe import Published, Recipe
from spec_jax.checkpoints.reference import locate, path_of
from spec_jax.config.other_names import HEADS
from spec_jax.errors import CheckpointError
from spec_jax.kernels import QuantizedForm
from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import Family, stored_as
from spec_jax.models.hf_keys import check_keys
from spec_jax.models.model import Model
from spec_jax.models.registry import family_of_gguf, family_of_hf
from spec_jax.models.whisper import config_from_hf

_HEAD = re.compile("eagle|medusa|mlp_?speculator|dflash", re.IGNORECASE)


@dataclass(frozen=True)
class Shape:
    """A model's shape, for plans.

    Attributes:
      name: its name in messages.
      config: its shape.
      published: the measurements that its recipe quotes, if any.
      forms: how a .gguf file quantizes weights, by our names; None of other models.
    """

    name: str
    config: TransformerConfig
    published: Published | None = None
    forms: Mapping[str, QuantizedForm] | None = None


def read_shape(
    reference: str | os.PathLike[str], *, on_progress: Callable[[str], object] | None = None
) -> Shape:
    """Reads only a model's config.

    Args:
      reference: a Hugging Face directory, of which config.json suffices, a directory that
        `convert` wrote, a .gguf file, a recipe (.toml) or its name, a folder of a bucket or a hub
        id `org/name[@revision]`; of the last two only config.json is fetched.
      on_progress: called with a line of text before each step that takes time.

    Raises:
      CheckpointError: it is missing, damaged, or its architecture is not supported.
    """
    name, path = locate(reference, on_progress or (lambda line: None), config_only=True)
    published = None
    if (file := path_of(reference)).suffix == ".toml":
        recipe = Recipe.read(file)
        published = recipe.published
        if recipe.shape is not None:
            return Shape(name, recipe.shape, published)
    with reading(path):
        if path.is_dir():
            return Shape(name, _of_directory(path), published)
        file = GgufFile(path)
        family, config = gguf_shape(file)
    return Shape(name, config, published, _forms(file, family, config))


def hf_shape(path: Path) -> tuple[Family, TransformerConfig]:
    """The family and shape of a Hugging Face directory.

    Raises:
      CheckpointError: its config.json is missing or makes no sense, or is of no known family.
    """
    file = path / "config.json"
    config = read_json(file)
    with making_sense(file):
        _refuse_heads(config)
        family = family_of_hf(config.get("model_type"))
        check_keys(family.model_type, config)
        return family, family.config_from_hf(config)


def _refuse_heads(config: Mapping[str, Any]) -> None:
    """Refuses what reads a target's features, under the names of its makers."""
    named = config.get("model_type"), config.get("speculators_model_type")
    for name in map(str, (*named, config.get("architectures"))):
        if _HEAD.search(name):
            raise CheckpointError(f"this is {name}; {HEADS}.")


def gguf_shape(file: GgufFile) -> tuple[Family, TransformerConfig]:
    """The family and shape of a GGUF file; raises the same errors."""
    with making_sense(file.path):
        family = family_of_gguf(file.metadata.get("general.architecture"))
        assert family.config_from_gguf  # it has an architecture's name
        return family, family.config_from_gguf(file.metadata, file)


def _forms(file: GgufFile, family: Family, config: TransformerConfig) -> dict[str, QuantizedForm]:
    table, forms = family.gguf_weights_of(config), {}
    for name, leaf in Model.abstract(config, dtype="float32").weights.items():
        part, tensor = stored_as(table, name)
        form = file.form(tensor) if is_quantized(name, leaf.shape) and not part.each else None
        if form is not None:
            forms[name] = form
    return forms


def _of_directory(path: Path) -> TransformerConfig:
    if (path / MANIFEST).is_file():
        return read_manifest(path)[0]
    if (path / MODEL).is_file():
        with making_sense(path / MODEL):
            return config_from_hf(Ctranslate2Directory(path).config)
    return hf_shape(path)[1]
