"""The parser that all commands share, and how values are read. Imports no JAX."""

import argparse
import json
import shutil
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from spec_jax.errors import ConfigError, did_you_mean

T = TypeVar("T")
MAX_COLUMNS = 100
"""Columns of help on a wide terminal: longer lines are hard to read."""
WIDE = 80
"""Below this number of columns, what an option means begins further to the left."""
MAX_NUMBERS = 1000
"""Most numbers of a list such as 1-4."""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Fits help to the terminal: long choices are broken at their bars, paragraphs are filled."""

    def __init__(self, prog: str):
        columns = min(shutil.get_terminal_size().columns, MAX_COLUMNS)
        super().__init__(prog, max_help_position=36 if columns >= WIDE else 20, width=columns)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip().split("\n\n")
        return "\n\n".join(
            textwrap.fill(each, width, initial_indent=indent, subsequent_indent=indent)
            for each in paragraphs
        )

    def _format_action_invocation(self, action: argparse.Action) -> str:
        line = super()._format_action_invocation(action)
        width = self._width - self._current_indent
        if len(line) <= width or "|" not in line:
            return line
        name, _, choices = line.rpartition(" ")
        indent = " " * (self._current_indent + 4)
        lines = textwrap.wrap(choices.replace("|", "| "), width - 4, break_on_hyphens=False)
        return "\n".join([name, *(indent + line.replace("| ", "|") for line in lines)])


def _remedy(flag: str) -> str:
    """What to do instead of a flag that users of vLLM give, or nothing."""
    # A mistake may take longer than help.
    from spec_jax.config.unsupported import IGNORED_BY_LLM, NOT_OF_LLM

    name = flag.lstrip("-").replace("-", "_")
    if name == "tensor_parallel_size":
        return "use --layout with the name of a layout, such as gpu-2; cpu-2 emulates two devices"
    if name in IGNORED_BY_LLM:
        return f"leave it out: {IGNORED_BY_LLM[name]}"
    hint = NOT_OF_LLM.get(name, "")
    return "" if name == "target" or "speculative_config" in hint else hint  # no flags have these


class Parser(argparse.ArgumentParser):
    """Raises `ConfigError` instead of exiting, and suggests what a misspelt flag may have meant."""

    def __init__(self, command: str, operands: str, summary: str, epilog: str):
        usage = " ".join(f"spec-jax {command} {operands} [options]".split())
        width = min(shutil.get_terminal_size().columns, MAX_COLUMNS) - len("usage: ")
        super().__init__(
            prog=f"spec-jax {command}",
            usage="\n  ".join(textwrap.wrap(usage, width, break_on_hyphens=False)),
            description=summary,
            epilog=epilog,
            formatter_class=_Formatter,
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
            if remedy := _remedy(name):
                raise ConfigError(f"unknown option {name!r}; {remedy}.")
            flags = list(self._option_string_actions)
            hints = [f" Did you mean {flag!r}?" for flag in flags if flag.startswith(name)]
            hint = (hints or [did_you_mean(name, flags)])[0]
            if not hint.startswith(" Did you mean"):
                hint = f" `{self.prog} --help` lists the options."
            raise ConfigError(f"unknown option {name!r}.{hint}")
        values = vars(namespace)
        values.pop("debug", None)  # `main` has read it
        return values

    def print_help(self, file: Any = None) -> None:
        """Prints the help; argparse itself would ignore that it cannot be written."""
        print(self.format_help(), end="", file=file)

    def error(self, message: str) -> NoReturn:
        """Reports argparse's errors in the same way as all others."""
        raise ConfigError(f"{message.removeprefix('argument ')}.")


def _reader(kind: Callable[[str], T], noun: str) -> Callable[[str], T]:
    """Reads a value of a kind, for `type=`."""

    def read(text: str) -> T:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {noun}") from None

    return read


integer, number = _reader(int, "an integer"), _reader(float, "a number")


def integers(text: str) -> tuple[int, ...]:
    """Integers such as `1,2,4` or `1-4`, for `type=`."""
    values: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        new = range(integer(first), integer(last) + 1) if dash and first else [integer(part)]
        if not new or len(values) + len(new) > MAX_NUMBERS:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not 1 to {MAX_NUMBERS} numbers, such as 1,2,4 or 1-4"
            )
        values += new
    return tuple(values)


def several(read: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Reads values with commas between them, for `type=`."""
    return lambda text: tuple(read(part.strip()) for part in text.split(","))


def json_object(text: str) -> dict[str, Any]:
    """A JSON object, for `type=`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object; give {{"name": value}}')
    return value
