"""What every config class checks, with a message that names the value and the remedy."""

import dataclasses
import functools
import json
import numbers
from collections.abc import Iterable
from typing import Any, TypeVar, dataclass_transform

from spec_jax.errors import ConfigError, did_you_mean

T = TypeVar("T")

FLOAT32_MAX = 3.4028234e38
"""Parameters travel to the device as float32."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def config_class(cls: type[T]) -> type[T]:
    """A frozen keyword-only dataclass whose unknown keys raise `ConfigError` with a suggestion."""
    data_class: Any = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    names = {field.name for field in dataclasses.fields(data_class)}
    plain_init = data_class.__init__

    @functools.wraps(plain_init)
    def checked_init(self: Any, **values: Any) -> None:
        for name in values:
            if name not in names:
                hint = did_you_mean(name, names)
                raise ConfigError(f"{cls.__name__} has no option {name!r}.{hint}")
        plain_init(self, **values)

    data_class.__init__ = checked_init
    return data_class


def _is(kind: type, value: Any) -> bool:
    """Whether it is such a number, NumPy's included; a bool is none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def check_number(
    name: str,
    value: Any,
    *,
    low: float,
    high: float = FLOAT32_MAX,
    open_low: bool = False,
    otherwise: str = "",
) -> None:
    """Refuses anything but a float32 number in [low, high], or (low, high] with `open_low`."""
    if not _is(numbers.Real, value) or not low <= value <= high or (open_low and value == low):
        left = "(-inf" if low == -FLOAT32_MAX else f"{'(' if open_low else '['}{low:g}"
        right = "inf)" if high == FLOAT32_MAX else f"{high:g}]"
        raise ConfigError(f"{name} is {value!r}; give a number in {left}, {right}{otherwise}.")


def check_integer(name: str, value: Any, *, low: int, high: int | None = None) -> None:
    """Refuses anything but a whole number in [low, high]."""
    if not _is(numbers.Integral, value) or value < low or (high is not None and value > high):
        top = "" if high is None else f" and at most {high}"
        raise ConfigError(f"{name} is {value!r}; give a whole number of at least {low}{top}.")


def as_tuple(name: str, value: Any, of: str) -> tuple:
    """The values as a tuple; refuses what is no collection."""
    if not isinstance(value, Iterable):
        raise ConfigError(f"{name} is {value!r}; give a list of {of}.")
    return tuple(value)


def as_texts(name: str, value: Any) -> tuple[str, ...]:
    """One text or several as a tuple, none of them empty."""
    texts = as_tuple(name, (value,) if isinstance(value, str) else value, "strings")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ConfigError(f"{name} holds {text!r}; give non-empty strings.")
    return texts


def as_json_text(name: str, value: Any) -> str:
    """A JSON object as text; the order of its keys is kept, which is the order of the output."""
    try:
        text = value if isinstance(value, str) else json.dumps(dict(value))
        is_object = isinstance(json.loads(text), dict)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} is {value!r}; give a JSON object: {error}.") from None
    if not is_object:
        raise ConfigError(f"{name} is {value!r}; give a JSON object.")
    return text


def check_choice(name: str, value: Any, known: Iterable[str]) -> None:
    """Refuses a value that is none of the known ones."""
    if value not in tuple(known):
        raise ConfigError(f"{name} is {value!r}.{did_you_mean(str(value), known)}")
