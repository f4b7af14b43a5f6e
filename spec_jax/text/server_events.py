"""What servers of the OpenAI API send: events of a stream, and errors."""

import json
from collections.abc import Iterator
from typing import Any

from spec_jax.errors import RequestError

_MAX_SHOWN = 200


class EventReader:
    """The JSON objects of a stream whose text comes in pieces, which may end anywhere."""

    def __init__(self) -> None:
        self._line = ""

    def events(self, text: str) -> Iterator[dict[str, Any]]:
        """The objects that this piece completes.

        Raises:
          RequestError: one of them is an error.
        """
        # Not splitlines(): JSON strings may hold the other line separators of Unicode.
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            field, _, data = line.partition(":")
            if field != "data" or data.strip() == "[DONE]":
                continue
            event = json.loads(data)
            if not isinstance(event, dict):
                continue
            if error := event.get("error"):
                raise RequestError(_said(error))
            yield event


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
