"""Runs a command: its flags are parsed and its prompts are read before JAX is imported.

JAX takes seconds to import, so everything that can be refused without it is refused first.
"""

import importlib
from collections.abc import Sequence
from typing import Any

from spec_jax.cli import decoding_options, flags, tool_options
from spec_jax.cli.options import PromptOptions
from spec_jax.cli.prompts import read_prompts

OPTIONS: dict[str, type] = {
    "generate": decoding_options.GenerateOptions,
    "chat": decoding_options.ChatOptions,
    "transcribe": decoding_options.TranscribeOptions,
    "audit": decoding_options.AuditOptions,
    "evaluate": decoding_options.EvaluateOptions,
    "bench": tool_options.BenchOptions,
    "report": tool_options.ReportOptions,
    "profile": decoding_options.ProfileOptions,
    "train-draft": tool_options.TrainOptions,
    "convert": tool_options.ConvertOptions,
    "plan": tool_options.PlanOptions,
    "compile": tool_options.CompileOptions,
    "env": tool_options.EnvOptions,
}
"""Command -> the class of its options. `run` of the module of the command's name runs it."""


def parse(command: str, arguments: Sequence[str]) -> Any:
    """The options of a command.

    Raises:
      ConfigError: an argument is missing, unknown, malformed or out of range, or two contradict
        each other.
    """
    return flags.parse(command, OPTIONS[command], arguments)


def run(command: str, arguments: Sequence[str]) -> int:
    """Runs a command; returns its exit code.

    Args:
      command: its name.
      arguments: the arguments after it.
    """
    parsed = parse(command, arguments)
    texts = ()
    if isinstance(parsed, decoding_options.AuditOptions):
        texts = (read_prompts(parsed.sources) if parsed.sources else None,)
    elif isinstance(parsed, PromptOptions):
        texts = (read_prompts(parsed.sources),)
    module = importlib.import_module(f"spec_jax.cli.{command.replace('-', '_')}")
    return module.run(parsed, *texts)
