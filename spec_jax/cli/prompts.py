"""Prompts from arguments, files and standard input. Imports no JAX."""

import sys
from collections.abc import Sequence
from pathlib import Path

from spec_jax.cli.options import Source
from spec_jax.errors import RequestError, did_you_mean
from spec_jax.text.prompt_files import json_lines, read_text


def read_prompts(sources: Sequence[Source]) -> list[str]:
    """All prompts, in order; standard input is the prompt if there is no source.

    Raises:
      RequestError: there is no prompt, one is empty, or a file cannot be read.
    """
    if not sources:
        if sys.stdin is None or sys.stdin.isatty():
            raise RequestError(
                "no prompt given; give one as an argument, with --prompt-file, or on standard "
                "input."
            )
        sources = (Source("file", "-"),)
    return [prompt for source in sources for prompt in _read(source)]


def _read(source: Source) -> list[str]:
    if source.kind == "text":
        return [checked(source.value, "a prompt")]
    name = "standard input" if source.value == "-" else source.value
    if source.value == "-" and sys.stdin is None:
        raise RequestError("standard input is closed; give a prompt as an argument.")
    text = read_text(sys.stdin.buffer if source.value == "-" else Path(source.value), name)
    if source.value.endswith(".jsonl"):
        return _json_lines(text, name)
    return [checked(text.removesuffix("\n").removesuffix("\r"), name)]


def _json_lines(text: str, name: str) -> list[str]:
    prompts = []
    for where, value in json_lines(text, name):
        if not isinstance(value, dict):
            raise RequestError(f'{where} is {value!r}; expected an object {{"prompt": "..."}}.')
        if "prompt" not in value:
            hint = f" Found: {', '.join(value)}." if value else did_you_mean("", ["prompt"])
            raise RequestError(f'{where} has no key "prompt".{hint}')
        if not isinstance(value["prompt"], str):
            raise RequestError(f"{where} has the prompt {value['prompt']!r}; give text.")
        prompts.append(checked(value["prompt"], where))
    if not prompts:
        raise RequestError(f'{name} holds no prompts; expected lines such as {{"prompt": "..."}}.')
    return prompts


def checked(text: str, where: str) -> str:
    """The text, unless it is empty or holds bytes that the locale's encoding cannot decode.

    An error calls the text by the name `where`.
    """
    if not text:
        raise RequestError(f"{where} is empty ('{text}'); give at least one character.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{where} is not valid text: {text!r}; give UTF-8.") from error
    return text
