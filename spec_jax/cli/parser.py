"""The parser that all commands share. Imports no JAX."""

import argparse
import functools
from collections.abc import Sequence
from typing import Any, NoReturn

from spec_jax.errors import ConfigError, did_you_mean


class Parser(argparse.ArgumentParser):
    """Raises `ConfigError` instead of exiting, and suggests what a misspelt flag may have meant."""

    def __init__(self, command: str, operands: str, epilog: str | None = None):
        super().__init__(
            prog=f"spec-jax {command}",
            usage=" ".join(f"spec-jax {command} {operands} [options]".split()),
            epilog=epilog,
            formatter_class=functools.partial(
                argparse.RawDescriptionHelpFormatter, max_help_position=36
            ),
            argument_default=argparse.SUPPRESS,  # what is not given is left to the config objects
            allow_abbrev=False,  # an abbreviation would break when a flag is added
        )

    def parse(self, arguments: Sequence[str]) -> dict[str, Any]:
        """The values that were given, by destination."""
        namespace, unknown = self.parse_known_args(arguments)
        for argument in unknown:
            if not argument.startswith("-"):
                raise ConfigError(
                    f"unexpected argument {argument!r}; quote a prompt that holds spaces, and "
                    "repeat --prompt for several."
                )
            name = argument.split("=")[0]
            flags = list(self._option_string_actions)
            hints = [f" Did you mean {flag!r}?" for flag in flags if flag.startswith(name)]
            hint = (hints or [did_you_mean(name, flags)])[0]
            if not hint.startswith(" Did you mean"):
                hint = f" `{self.prog} --help` lists the options."
            raise ConfigError(f"unknown option {name!r}.{hint}")
        return vars(namespace)

    def error(self, message: str) -> NoReturn:
        """Reports argparse's own complaints in the same way as all others."""
        raise ConfigError(f"{message.removeprefix('argument ')}.")


def whole(text: str) -> int:
    """A whole number, for `type=`."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def number(text: str) -> float:
    """A number, for `type=`."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def wholes(text: str) -> tuple[int, ...]:
    """Whole numbers such as `1,2,4` or `1-4`, for `type=`."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        found += range(whole(first), whole(last) + 1) if dash and first else [whole(part)]
    return tuple(found)


def numbers(text: str) -> tuple[float, ...]:
    """Numbers such as `0,0.8`, for `type=`."""
    return tuple(number(part) for part in text.split(","))


def names(text: str) -> tuple[str, ...]:
    """Names such as `a,b`, for `type=`."""
    return tuple(part.strip() for part in text.split(","))


def add_debug(group: Any) -> None:
    """Adds the flag that every command has."""
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")
