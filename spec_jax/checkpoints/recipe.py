"""Recipes: TOML files with the source of a model, or only its shape."""

import dataclasses
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import AfterValidator, BeforeValidator
from pydantic_core import PydanticCustomError

from spec_jax.config import Positive, Table, Text
from spec_jax.errors import CheckpointError
from spec_jax.models.config import TransformerConfig, layer_stack

_SOURCES = ("path", "hub", "pypi")
_WHEEL_KEYS = ("pypi", "sha256", "file")


def _like(pattern: str, what: str) -> AfterValidator:
    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise PydanticCustomError("pattern", "It should be {what}", {"what": what})
        return value

    return AfterValidator(check)


_AS_TUPLE = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else (value,))
_Requirement = Annotated[
    Text, _like(r"[A-Za-z0-9][\w.-]*==[\w.!+]+", "a requirement name==version")
]
_Checksum = Annotated[
    Text, _like(r"[0-9a-f]{64}", "the wheel's checksum, 64 lower-case hexadecimal digits")
]


class Published(Table):
    """Published measurements of a model of this shape, to compare a projection with.

    Attributes:
      ms_per_token: milliseconds of one decoding step.
      layout: the layout it was measured on, a file's name without its ending.
      source: who measured it, and how.
    """

    ms_per_token: Positive
    layout: Text
    source: Text


class _Source(Table):
    """The source of weights; for wheels, one entry of each kind for each part of the file.

    With `beside`, the model is a directory: further files of the first wheel stand beside the file.
    """

    path: Text | None = None
    hub: Text | None = None
    pypi: Annotated[tuple[_Requirement, ...], _AS_TUPLE] | None = None
    sha256: Annotated[tuple[_Checksum, ...], _AS_TUPLE] = ()
    file: Annotated[tuple[Text, ...], _AS_TUPLE] = ()
    beside: Annotated[tuple[Text, ...], _AS_TUPLE] = ()


_FIELDS: dict[str, Any] = {
    field.name: (field.type, ... if field.default is dataclasses.MISSING else field.default)
    for field in dataclasses.fields(TransformerConfig)
    if field.name != "layers"
}
# RoPE scaling extends contexts, which random weights do not need.
_RULES: dict[str, Any] = {
    name: (rule.annotation, ... if rule.default is rule.empty else rule.default)
    for name, rule in inspect.signature(layer_stack).parameters.items()
    if name not in ("rope_scaling", "is_sparse")
}
_ENCODER: dict[str, Any] = {"encoder": ("_Shape | None", None)}
_Shape = pydantic.create_model("_Shape", __base__=Table, **(_FIELDS | _RULES | _ENCODER))


class _RecipeFile(Table):
    name: Annotated[
        Text, _like(r"[A-Za-z0-9][\w.-]*", "of letters, digits, '-', '_' and '.', such as llama-8b")
    ]
    license: Text | None = None
    source: _Source = _Source()
    shape: _Shape | None = None  # pyright: ignore[reportInvalidTypeForm]
    published: Published | None = None


@dataclass(frozen=True)
class Wheel:
    """A wheel that carries a model's file, or a part of one.

    Attributes:
      pypi: a requirement `name==version`.
      sha256: its checksum.
      file: the file inside of it.
    """

    pypi: str
    sha256: str
    file: str


@dataclass(frozen=True)
class Recipe:
    """A model's source and license.

    Exactly one of `path`, `hub`, `wheels` and `shape` is set.

    Attributes:
      name: the model's name, and its folder in the cache.
      license: the weights' SPDX license expression; empty where there are none.
      path: a directory or .gguf file, relative to the recipe.
      hub: a hub id `org/name[@revision]`.
      wheels: the wheels of a .gguf file or a model.bin, its parts in order.
      beside: further files of the first wheel, if the model is a directory.
      shape: the model's shape; the weights are random.
      published: published measurements of this shape.
    """

    name: str
    license: str = ""
    path: str = ""
    hub: str = ""
    wheels: tuple[Wheel, ...] = ()
    beside: tuple[str, ...] = ()
    shape: TransformerConfig | None = None
    published: Published | None = None

    @classmethod
    def read(cls, recipe: Path) -> "Recipe":
        """Reads and checks a recipe.

        Raises:
          CheckpointError: it is not TOML, or a key is unknown, missing or malformed.
        """
        file = _RecipeFile.read(recipe, CheckpointError)
        try:
            fields = _of_source(file) if file.shape is None else _of_shape(file)
        except CheckpointError as error:
            raise CheckpointError(f"{recipe}: {error}") from None
        return cls(name=file.name, published=file.published, **fields)


def _of_source(file: _RecipeFile) -> dict[str, Any]:
    """The fields of a recipe with a source of weights."""
    source = file.source
    kinds = [key for key in _SOURCES if getattr(source, key) is not None]
    if len(kinds) != 1:
        raise CheckpointError(
            f"[source] has {', '.join(kinds) or 'none'} of {', '.join(_SOURCES)}; give exactly one."
        )
    if file.license is None:
        raise CheckpointError("license is missing; give the weights' SPDX license expression.")
    if source.pypi is None:
        if source.sha256 or source.file or source.beside:
            raise CheckpointError("sha256, file and beside belong to a pypi source only.")
        return {"license": file.license, kinds[0]: getattr(source, kinds[0])}
    columns = [source.pypi, source.sha256, source.file]
    counts = [len(each) for each in columns]
    if len(set(counts)) > 1 or not counts[0]:
        raise CheckpointError(
            f"{', '.join(_WHEEL_KEYS)} have {', '.join(map(str, counts))} entries; give each of "
            "them one text, or a list with one text for every part of the file."
        )
    wheels = tuple(Wheel(*row) for row in zip(*columns, strict=True))
    return {"license": file.license, "wheels": wheels, "beside": source.beside}


def _of_shape(file: _RecipeFile) -> dict[str, Any]:
    """The fields of a recipe that gives a shape and no weights."""
    for key in file.model_fields_set & {"source", "license"}:
        raise CheckpointError(
            f"{key} belongs to weights, but [shape] asks for random ones; give one or the other."
        )
    return {"shape": _config_of(file.shape)}


def _config_of(shape: Any) -> TransformerConfig:
    options = dict(shape)
    if options["encoder"] is not None:
        options["encoder"] = _config_of(options["encoder"])
    return TransformerConfig.of(**options)
