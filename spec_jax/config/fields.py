"""Values that are checked: frozen classes of them, tables of TOML files, kinds of fields."""

import dataclasses
import functools
import json
import numbers
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, dataclass_transform

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from spec_jax.config.explain import explain
from spec_jax.errors import ConfigError, SpecJaxError, did_you_mean, unknown_option

T = TypeVar("T")
TableT = TypeVar("TableT", bound="Table")

FLOAT32_MAX = 3.4028234e38
"""Parameters travel to the device as float32."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def config_class(cls: type[T]) -> type[T]:
    """A frozen keyword-only dataclass whose values pydantic checks; errors are `ConfigError`.

    `ELSEWHERE` of the class may say what to do instead of giving options that it does not have.
    """
    strict = pydantic.ConfigDict(extra="forbid", strict=True)
    decorate = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=strict)
    data_class: Any = decorate(cls)
    names = {field.name for field in dataclasses.fields(data_class)}
    validate = data_class.__init__

    @functools.wraps(validate)
    def checked_init(self: Any, **values: Any) -> None:
        for name in sorted(values.keys() - names):
            raise unknown_option(cls.__name__, name, names, getattr(cls, "ELSEWHERE", {}))
        try:
            validate(self, **values)
        except pydantic.ValidationError as error:
            cause = error.errors()[0].get("ctx", {}).get("error")
            raise (
                cause if isinstance(cause, SpecJaxError) else ConfigError(explain(error))
            ) from None

    data_class.__init__ = checked_init
    return data_class


class Table(pydantic.BaseModel):
    """A table of a TOML file, whose keys are its fields and no others."""

    model_config = pydantic.ConfigDict(strict=True, frozen=True)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            raise PydanticCustomError("table", "It should be a table")
        for key in values.keys() - cls.model_fields.keys():
            context = {"key": key, "hint": did_you_mean(key, cls.model_fields)}
            raise PydanticCustomError("unknown_key", "{hint}", context)
        return values

    @classmethod
    def read(cls: type[TableT], file: Path, error: type[SpecJaxError]) -> TableT:
        """Reads a file.

        Raises:
          SpecJaxError: of the type `error`: it is no TOML, or a key is unknown, missing or
            malformed.
          OSError: it cannot be read.
        """
        if file.exists() and not file.is_file():
            raise error(f"{file} is no file but a directory, a pipe or a device.")
        try:
            return cls.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as reason:
            raise error(f"{file} is not a TOML file: {reason}.") from None
        except pydantic.ValidationError as reason:
            raise error(f"{file}: {explain(reason)}") from None


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, int) else value


Whole = Annotated[int, BeforeValidator(_plain)]
Number = Annotated[
    float, Field(ge=-FLOAT32_MAX, le=FLOAT32_MAX, allow_inf_nan=False), BeforeValidator(_plain)
]
AtLeast0 = Annotated[Whole, Field(ge=0)]
AtLeast1 = Annotated[Whole, Field(ge=1)]
NotNegative = Annotated[Number, Field(ge=0)]
Positive = Annotated[Number, Field(gt=0)]
Share = Annotated[Number, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]


def one_of(known: Collection[str], aliases: Mapping[str, str] | None = None) -> BeforeValidator:
    """Refuses a value that is not one of those known then; replaces an alias by its meaning."""
    aliases = aliases or {}

    def check(value: Any) -> Any:
        names = tuple(known)
        if isinstance(value, str):
            value = aliases.get(value, value)
        if value not in names:
            hint = did_you_mean(str(value), (*names, *aliases))
            raise PydanticCustomError("choice", "{hint}", {"hint": hint})
        return value

    return BeforeValidator(check)


def to_tuple(value: Any) -> tuple:
    """Any collection as a tuple, but no text and no mapping."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise PydanticCustomError("list", "It should be a list")
    return tuple(value)


def to_json(value: Any) -> Any:
    """A JSON object as text; the order of its keys is kept, which is the order of the output."""
    if value is None:
        return None
    try:
        text = value if isinstance(value, str) else json.dumps(dict(value))
        if isinstance(json.loads(text), dict):
            return text
        why = "it is none"
    except (TypeError, ValueError) as error:
        why = str(error)
    raise PydanticCustomError("json", "It should be a JSON object: {why}", {"why": why})


def _finite_or_ban(value: float) -> float:
    if not abs(value) <= FLOAT32_MAX and value != float("-inf"):
        raise PydanticCustomError("bias", "It should be a finite number, or -inf to ban the token")
    return value


Bias = Annotated[float, AfterValidator(_finite_or_ban), BeforeValidator(_plain)]


def or_empty(empty: object) -> BeforeValidator:
    """Takes None for what says nothing, as vLLM does."""
    return BeforeValidator(lambda value: empty if value is None else value)


Texts = Annotated[
    Sequence[Text],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else to_tuple(value)),
    or_empty(()),
]
"""One text or several; a tuple once it was checked."""
