"""Values that are checked: frozen classes of options, tables of TOML files, types of fields."""

import dataclasses
import functools
import json
import numbers
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from spec_jax.config.explain import explain
from spec_jax.errors import ConfigError, SpecJaxError, did_you_mean, unknown_option

T = TypeVar("T")
TableT = TypeVar("TableT", bound="Table")

FLOAT32_MAX = 3.4028234e38
"""Parameters travel to the device as float32."""


@dataclasses.dataclass(frozen=True)
class Flag:
    """How the command line shows an option, where its name and type do not tell; in `Annotated`.

    Attributes:
      metavar: stands for the value in help texts.
      name: the flag, if it is not the option's name.
      also: another name of the flag.
      off: a flag that switches it off again.
      commas: several values have commas between them; otherwise the flag is repeated.
      positional: an argument that stands alone instead of a flag.
      hidden: there is no flag.
      remedy: what to do if the option is needed and was not given.
      read: reads the value from the text of one flag.
      add: adds the flags of the option to a group of argparse, with a destination.
    """

    metavar: str = ""
    name: str = ""
    also: str = ""
    off: str = ""
    commas: bool = False
    positional: bool = False
    hidden: bool = False
    remedy: str = ""
    read: Callable[[str], Any] | None = None
    add: Callable[[Any, str], None] | None = None


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,)
)
def config_class(cls: type[T]) -> type[T]:
    """A frozen keyword-only dataclass whose values pydantic checks; errors are `ConfigError`.

    The docstring below a field is its documentation, and its first sentence the help of its flag.
    `UNSUPPORTED` of the class may say what to do instead of giving options that it does not have,
    and its class method `accept` what is validated of the values that were given.
    """
    strict = pydantic.ConfigDict(extra="forbid", strict=True)
    decorate = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=strict)
    data_class: Any = decorate(cls)
    validate = data_class.__init__

    @functools.wraps(validate)
    def checked_init(self: Any, **values: Any) -> None:
        if hasattr(cls, "accept"):
            values = data_class.accept(values)
        for name in sorted(values.keys() - (names := option_names(data_class))):
            raise unknown_option(cls.__name__, name, names, getattr(cls, "UNSUPPORTED", {}))
        try:
            validate(self, **values)
        except pydantic.ValidationError as error:
            cause = error.errors()[0].get("ctx", {}).get("error")
            raise (
                cause if isinstance(cause, SpecJaxError) else ConfigError(explain(error))
            ) from None

    def __setattr__(self: Any, name: str, value: object) -> None:
        raise dataclasses.FrozenInstanceError(
            f"{cls.__name__} does not change; write "
            f"dataclasses.replace(..., {name}={value!r}), which returns a changed copy."
        )

    data_class.__init__ = checked_init
    data_class.__setattr__ = __setattr__
    return data_class


def option_names(config: type) -> list[str]:
    """The options that a config class takes."""
    return [field.name for field in dataclasses.fields(config) if field.init]


@functools.cache
def annotations_of(config: type) -> dict[str, Any]:
    """The type of each field of a config class, with all that `Annotated` adds."""
    return get_type_hints(config, include_extras=True)


def choices_of(annotation: Any) -> tuple[Any, ...]:
    """The values that a type allows if it is, or holds, a `Literal`; none otherwise."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return sum((choices_of(each) for each in get_args(annotation)), ())


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
          SpecJaxError: of the type `error`: it is not TOML, or a key is unknown, missing or
            malformed.
          OSError: it cannot be read.
        """
        if file.exists() and not file.is_file():
            raise error(f"{file} is not a file but a directory, a pipe or a device.")
        try:
            return cls.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as reason:
            raise error(f"{file} is not a TOML file: {reason}.") from None
        except pydantic.ValidationError as reason:
            raise error(f"{file}: {explain(reason)}") from None
        except error as reason:  # by a validator
            raise error(f"{file}: {reason}") from None


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, int) else value


Integer = Annotated[int, BeforeValidator(_plain)]
Number = Annotated[
    float, Field(ge=-FLOAT32_MAX, le=FLOAT32_MAX, allow_inf_nan=False), BeforeValidator(_plain)
]
AtLeast0 = Annotated[Integer, Field(ge=0)]
AtLeast1 = Annotated[Integer, Field(ge=1)]
NotNegative = Annotated[Number, Field(ge=0)]
Positive = Annotated[Number, Field(gt=0)]
Share = Annotated[Number, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]


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


Many = Annotated[Sequence[T], BeforeValidator(to_tuple)]
"""Several values; a tuple once they were checked."""


def or_empty(empty: object) -> BeforeValidator:
    """Takes None for what says nothing, as vLLM does."""
    return BeforeValidator(lambda value: empty if value is None else value)


Texts = Annotated[
    Sequence[Text],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else to_tuple(value)),
    or_empty(()),
]
"""One text or several; a tuple once it was checked."""
