"""What servers of the OpenAI API send: events of a stream, and errors."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from spec_jax.errors import RequestError

_MAX_SHOWN = 200


def events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream's lines.

    Raises:
      RequestError: one of them is an error.
    """
    for line in lines:
        if (event := event_of(line)) is not None:
            yield event


def event_of(line: str) -> dict[str, Any] | None:
    """The JSON object of a line of a stream; None for lines that hold none.

    Raises:
      RequestError: it is an error.
    """
    field, _, data = line.partition(":")
    if field != "data" or data.strip() == "[DONE]":
        return None
    event = json.loads(data)
    if not isinstance(event, dict):
        return None
    if error := event.get("error"):
        raise RequestError(_said(error))
    return event


def message_of(status: int, body: bytes) -> str:
    """What an answer that is an error says."""
    try:
        message = _said(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        message = body[:_MAX_SHOWN].decode(errors="replace")
    return f"the server answers {status}: {message}"


def _said(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:_MAX_SHOWN]
