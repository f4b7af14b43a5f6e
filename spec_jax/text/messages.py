"""Messages of conversations, in the form of the OpenAI API. Imports no JAX."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from spec_jax.errors import RequestError, did_you_mean


class TemplateOptions(TypedDict, total=False):
    """What a chat template gets besides the messages; see `Tokenizer.apply_chat_template`."""

    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None


ROLES = ("assistant", "developer", "system", "tool", "user")


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a conversation, each with its content as one text.

    Raises:
      RequestError: there is none, or one is malformed.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(
            f"messages is {messages!r}; give a list such as "
            "[{'role': 'user', 'content': 'Hello'}]."
        )
    return [_checked_message(message) for message in messages]


def _checked_message(message: Mapping[str, Any]) -> dict[str, Any]:
    calls_tools = isinstance(message, Mapping) and message.get("tool_calls")
    needed = {"role"} if calls_tools else {"role", "content"}
    if not isinstance(message, Mapping) or not needed <= set(message):
        raise RequestError(f"message {message!r} needs a 'role' and a 'content'.")
    role, content = message["role"], message.get("content")
    if role not in ROLES:
        raise RequestError(f"message role {role!r} is unknown.{did_you_mean(str(role), ROLES)}")
    if isinstance(content, list):
        content = "\n".join(_text_of(part, role) for part in content)
    if content is None and calls_tools:
        content = ""  # as in transformers
    if not isinstance(content, str):
        raise RequestError(f"a {role} message's content is {type(content).__name__}; give text.")
    return {**message, "content": content}


def _text_of(part: Any, role: str) -> str:
    """The text of a part of a message, as in the OpenAI API."""
    if isinstance(part, Mapping) and part.get("type") == "text" and type(part.get("text")) is str:
        return part["text"]
    raise RequestError(
        f"a part of a {role} message's content is {str(part)[:100]}; give "
        "{'type': 'text', 'text': ...}: only text is read."
    )


def checked_tools(tools: Any, where: str) -> list[dict[str, Any]]:
    """The functions that a chat template describes to the model; an error says where they are.

    Raises:
      RequestError: it is something else than a list of JSON schemas.
    """
    if not isinstance(tools, list) or not all(isinstance(each, dict) for each in tools):
        raise RequestError(
            f"{where} has the tools {str(tools)[:100]}; give a list such as "
            '[{"type": "function", "function": {"name": ..., "parameters": {...}}}].'
        )
    return tools
