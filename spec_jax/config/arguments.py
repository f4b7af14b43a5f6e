"""Checks of arguments that belong to no config class."""

import numbers
import os
import reprlib
from collections.abc import Iterable
from typing import Any

from spec_jax.errors import ConfigError


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raises `ConfigError` unless a value is one of the choices."""
    if value not in tuple(choices):
        raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(choices)}.")


def check_integer(name: str, value: Any, minimum: int, below: int | None = None) -> None:
    """Raises `ConfigError` unless a value is an integer, at least `minimum` and below `below`."""
    # NumPy's integers are `Integral` too; NumPy itself need not be imported for them.
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or int(value) < minimum or (below is not None and int(value) >= below):
        bound = "" if below is None else f" and below {below}"
        raise ConfigError(f"{name} is {value!r}; give an integer of at least {minimum}{bound}.")


def check_path(name: str, value: object) -> None:
    """Raises `ConfigError` unless a value may be a path."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else ""
    if not text or "\0" in text:
        raise ConfigError(f"{name} is {reprlib.repr(value)}; give a path or a name.")
