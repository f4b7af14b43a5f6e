"""Runs a command: its flags are parsed and its prompts are read before JAX is imported.

JAX takes seconds to import, so everything that can be refused without it is refused first.
"""

import importlib
from collections.abc import Sequence
from typing import Any

from spec_jax.cli import decoding_options, flags, tool_options
from spec_jax.cli.options import CompletedPrompts, PromptOptions
from spec_jax.cli.overview import COMMANDS
from spec_jax.cli.prompts import read_prompts

_CLASSES = vars(decoding_options) | vars(tool_options)
OPTIONS: dict[str, type] = {
    command: _CLASSES[f"{command.title().replace('-', '')}Options"] for command in COMMANDS
}
"""Command -> the class of its options. `run` of the module of the command's name runs it."""


def parse(command: str, arguments: Sequence[str]) -> Any:
    """The options of a command; the errors are the same as for `flags.parse`."""
    return flags.parse(command, OPTIONS[command], arguments)


def run(command: str, arguments: Sequence[str]) -> int:
    """Runs a command with the arguments after its name; returns its exit code."""
    options = parse(command, arguments)
    inputs = []
    if isinstance(options, PromptOptions):
        texts = isinstance(options, CompletedPrompts) or options.sources
        inputs = [read_prompts(options) if texts else []]
    from spec_jax.cli.screen import Screen

    module = importlib.import_module(f"spec_jax.cli.{command.replace('-', '_')}")
    with Screen(json_lines=getattr(options, "json", False)) as screen:
        return module.run(options, screen, *inputs)
