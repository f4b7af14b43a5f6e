"""Runs a command: its flags are parsed and its prompts are read before JAX is imported.

JAX takes seconds to import, so everything that can be refused without it is refused first.
"""

import importlib
from collections.abc import Sequence
from typing import Any

from spec_jax.cli import decoding_options, flags, server_options, tool_options
from spec_jax.cli.options import CompletedPrompts, PromptOptions
from spec_jax.cli.overview import COMMANDS
from spec_jax.cli.prompts import read_prompts

_CLASSES = vars(decoding_options) | vars(server_options) | vars(tool_options)
OPTIONS: dict[str, type] = {
    command: _CLASSES[f"{command.title().replace('-', '')}Options"] for command in COMMANDS
}
"""Command -> the class of its options. `run` of the module of the command's name runs it."""
OF_SERVERS: dict[str, tuple[str, type, str]] = {
    "chat": ("--url", server_options.ChatUrlOptions, "chat_url"),
    "bench": ("--serve", server_options.BenchServeOptions, "bench_serve"),
}
"""Command -> a flag that lets it ask a server, then the class of its options, and the module."""


def chosen(command: str, arguments: Sequence[str]) -> tuple[type, str]:
    """The class of options of a command with these arguments, and the module that runs it."""
    flag, options, module = OF_SERVERS.get(command, ("", object, ""))
    if flag and any(each.partition("=")[0] == flag for each in arguments):
        return options, module
    return OPTIONS[command], command.replace("-", "_")


def parse(command: str, arguments: Sequence[str]) -> Any:
    """The options of a command; the errors are the same as for `flags.parse`."""
    return flags.parse(command, chosen(command, arguments)[0], arguments)


def run(command: str, arguments: Sequence[str]) -> int:
    """Runs a command with the arguments after its name; returns its exit code."""
    options = parse(command, arguments)
    inputs = []
    if isinstance(options, PromptOptions):
        texts = isinstance(options, CompletedPrompts) or options.sources
        inputs = [read_prompts(options) if texts else []]
    from spec_jax.cli.screen import Screen

    module = importlib.import_module(f"spec_jax.cli.{chosen(command, arguments)[1]}")
    with Screen(json_lines=getattr(options, "json", False)) as screen:
        return module.run(options, screen, *inputs)
