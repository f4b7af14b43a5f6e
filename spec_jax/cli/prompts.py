"""Prompts from arguments, files and standard input. Imports no JAX."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spec_jax.cli.options import CompletedPrompts, PromptOptions, Source
from spec_jax.errors import ConfigError, RequestError, did_you_mean
from spec_jax.text.messages import checked_messages, checked_tools
from spec_jax.text.prompt_files import json_lines, read_text


@dataclasses.dataclass(frozen=True)
class ChatPrompt:
    """A prompt that is a conversation.

    Attributes:
      messages: as `LLM.chat` takes them.
      tools: the functions that the model may call, or None.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None

    def as_dict(self) -> dict[str, Any]:
        """The keys of its line in a file."""
        return {"messages": self.messages} | ({} if self.tools is None else {"tools": self.tools})


PromptText = str | ChatPrompt
"""A prompt as it is given."""


def title_of(prompt: PromptText) -> str:
    """What a heading shows: the prompt, or the last message."""
    return prompt if isinstance(prompt, str) else str(prompt.messages[-1]["content"])


def keys_of(prompt: PromptText) -> dict[str, Any]:
    """What a result says of its prompt: the keys of the prompt's line in a file."""
    return {"prompt": prompt} if isinstance(prompt, str) else prompt.as_dict()


def read_prompts(options: PromptOptions) -> list[PromptText]:
    """All prompts, in order; standard input is the prompt if none is named.

    Raises:
      RequestError: there is no prompt, one is empty, or a file cannot be read.
      ConfigError: something is for the chat template, but no prompt goes through it.
    """
    prompts = _read_all(options.sources)
    if isinstance(options, CompletedPrompts) and not options.chat:
        for name in ("tools", "chat_template_kwargs"):
            is_given = getattr(options, name) is not None
            if is_given and all(isinstance(each, str) for each in prompts):
                raise ConfigError(f"{name} is for the chat template; give --chat, too.")
    return prompts


def _read_all(sources: Sequence[Source]) -> list[PromptText]:
    if not sources:
        if sys.stdin is None or sys.stdin.isatty():
            raise RequestError(
                "no prompt given; give one as an argument, with --prompt-file, or on standard "
                "input."
            )
        sources = (Source("file", "-"),)
    return [prompt for source in sources for prompt in _read(source)]


def _read(source: Source) -> list[PromptText]:
    if source.kind == "text":
        return [checked(source.value, "a prompt")]
    name = "standard input" if source.value == "-" else source.value
    if source.value == "-" and sys.stdin is None:
        raise RequestError("standard input is closed; give a prompt as an argument.")
    text = read_text(sys.stdin.buffer if source.value == "-" else Path(source.value), name)
    if source.value.endswith(".jsonl"):
        return _json_lines(text, name)
    return [checked(text.removesuffix("\n").removesuffix("\r"), name)]


def _json_lines(text: str, name: str) -> list[PromptText]:
    prompts = [_of_line(value, where) for where, value in json_lines(text, name)]
    if not prompts:
        raise RequestError(f'{name} holds no prompts; expected lines such as {{"prompt": "..."}}.')
    return prompts


def _of_line(value: Any, where: str) -> PromptText:
    if not isinstance(value, dict):
        raise RequestError(f'{where} is {value!r}; expected an object {{"prompt": "..."}}.')
    if "messages" in value:
        if "prompt" in value:
            raise RequestError(f'{where} has both "prompt" and "messages"; give one of the two.')
        try:
            messages = checked_messages(value["messages"])
        except RequestError as error:
            raise RequestError(f"{where}: {error}") from None
        tools = value.get("tools")
        return ChatPrompt(messages, None if tools is None else checked_tools(tools, where))
    if "prompt" not in value:
        hint = f" Found: {', '.join(value)}." if value else did_you_mean("", ["prompt"])
        raise RequestError(f'{where} has no key "prompt" or "messages".{hint}')
    if not isinstance(value["prompt"], str):
        raise RequestError(f"{where} has the prompt {value['prompt']!r}; give text.")
    return checked(value["prompt"], where)


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
