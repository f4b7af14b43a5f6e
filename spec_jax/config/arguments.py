"""Checks of arguments that belong to no config class."""

import numbers
import os
from collections.abc import Iterable
from typing import Any

from spec_jax.errors import ConfigError


def check_choice(name: str, value: object, known: Iterable[str]) -> None:
    """Raises `ConfigError` unless a value is one of those that are known."""
    if value not in tuple(known):
        raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(known)}.")


def check_whole(name: str, value: Any, least: int, below: int | None = None) -> None:
    """Raises `ConfigError` unless a value is a whole number, at least `least` and below `below`."""
    # NumPy's integers are `Integral` too; NumPy itself need not be imported for them.
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_whole or int(value) < least or (below is not None and int(value) >= below):
        most = "" if below is None else f" and below {below}"
        raise ConfigError(f"{name} is {value!r}; give a whole number of at least {least}{most}.")


def check_path(name: str, value: object) -> None:
    """Raises `ConfigError` unless a value may be a path."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else ""
    if not text or "\0" in text:
        raise ConfigError(f"{name} is {value!r}; give a path or a name.")
