"""Training examples: prompts that the target answers, and texts."""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spec_jax.errors import ConfigError, RequestError
from spec_jax.text.prompt_files import json_lines, read_text
from spec_jax.text.tokenizer import Tokenizer

_KEYS = ("messages", "prompt", "text")
_USER_TURN = "\N{WHITE SQUARE}what the user says\N{WHITE SQUARE}"


@dataclasses.dataclass(frozen=True)
class Example:
    """The beginning of a row of training data.

    Attributes:
      prompt: token ids of the prompt; acceptance is not measured on them.
      text: token ids that follow; None if the target generates them.
    """

    prompt: tuple[int, ...]
    text: tuple[int, ...] | None = None


def fingerprints(paths: Sequence[Path]) -> list[str]:
    """Checksums of the files' contents.

    Raises:
      RequestError: a file cannot be read.
    """
    for path in paths:
        if path.exists() and not path.is_file():
            raise RequestError(f"{path} is not a file but a directory, a pipe or a device.")
    try:
        return [hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in paths]
    except OSError as error:
        raise RequestError(f"cannot read data file {error.filename!r}: {error.strerror}.") from None


def read_examples(paths: Sequence[Path], tokenizer: Tokenizer, length: int) -> list[Example]:
    """Reads data files.

    A `.jsonl` file holds one object per line with a key `messages` (the target answers the last
    question through its chat template), `prompt` (the target continues it without a template) or
    `text`. Every other file is one text. Texts are split into rows.

    Args:
      paths: the files; may be empty.
      tokenizer: the target's.
      length: tokens of a row.

    Raises:
      RequestError: a file cannot be read, is empty, or is malformed.
    """
    examples = []
    for path in paths:
        text = read_text(path, str(path), kind="data file", max_bytes=-1)
        if not text.strip():
            raise RequestError(f"data file {str(path)!r} is empty; leave it out or fill it.")
        entries = json_lines(text, str(path))
        for place, value in entries if path.suffix == ".jsonl" else [(str(path), {"text": text})]:
            examples += _examples(place, value, tokenizer, length)
    if paths and not examples:
        raise RequestError("the data holds nothing to learn from; give files that are not empty.")
    return examples


def prefix_of_questions(tokenizer: Tokenizer) -> list[int]:
    """The template's tokens before a user's message, for a target to continue with a question.

    Source: Magpie (arXiv 2406.08464).

    Raises:
      ConfigError: the target has no chat template.
    """
    if tokenizer.chat_template is None:
        raise ConfigError(
            "the target has no chat template, so it cannot generate its own prompts; name data "
            "files with --data."
        )
    text = tokenizer.apply_chat_template([{"role": "user", "content": _USER_TURN}])
    return tokenizer.encode(text.split(_USER_TURN)[0].rstrip(" "), add_special_tokens=False)


def _examples(place: str, value: Any, tokenizer: Tokenizer, length: int) -> list[Example]:
    """The examples of one entry of a file."""
    if not isinstance(value, dict) or sum(key in value for key in _KEYS) != 1:
        raise RequestError(
            f"{place} is {str(value)[:80]}; expected an object with one of the keys "
            f"{', '.join(_KEYS)}."
        )
    if "messages" in value:
        return [Example(_conversation(place, value["messages"], tokenizer))]
    text = value.get("prompt", value.get("text"))
    if not isinstance(text, str) or not text:
        raise RequestError(f"{place} has {text!r}; give text that is not empty.")
    ids = tuple(tokenizer.encode(text))
    if "prompt" in value:
        return [Example(ids)]
    rows = [ids[i : i + length] for i in range(0, len(ids), length)]
    return [Example(row[:1], row[1:]) for row in rows if len(row) > 1]


def _conversation(place: str, messages: Any, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The prompt for an answer to the last question; answers after it are left out."""
    try:
        last = max(i for i, each in enumerate(messages) if each["role"] == "user")
    except (ValueError, TypeError, KeyError):
        raise RequestError(
            f'{place} has the messages {messages!r}; give a list of {{"role", "content"}} in which '
            "there is a user message."
        ) from None
    text = tokenizer.apply_chat_template(messages[: last + 1])
    return tuple(tokenizer.encode(text, add_special_tokens=False))
