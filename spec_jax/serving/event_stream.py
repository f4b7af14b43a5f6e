"""Answers as streams of events."""

import json
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse

from spec_jax.async_llm import RequestStream
from spec_jax.serving.errors import api_error, is_expected

_ESCAPED = str.maketrans({char: f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"})
"""What some clients take for the end of a line, though it ends none in such a stream."""

log = logging.getLogger("spec_jax.serving")


class ApiRequest(Protocol):
    """A request of an endpoint that decodes, made from a body.

    Attributes:
      streams: whether the answer is a stream of events.
      ends_with_done: whether `[DONE]` ends the stream; else each event has a name, its `type`.
    """

    streams: bool
    ends_with_done: bool

    async def submit(self) -> RequestStream:
        """Queues it."""
        ...

    async def result(self, stream: RequestStream) -> dict[str, Any]:
        """The answer as one object."""
        ...

    def events(self, stream: RequestStream) -> AsyncIterator[dict[str, Any]]:
        """The answer as events."""
        ...


class EventStream(StreamingResponse):
    """The events of an answer, in the form that browsers call server-sent.

    Args:
      query: the request.
      stream: is closed with the answer, also if nobody reads it to its end.
    """

    def __init__(self, query: ApiRequest, stream: RequestStream):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        encoded = _encoded(query, stream)
        super().__init__(encoded, media_type="text/event-stream", headers=headers)
        self._stream = stream

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Sends the events, for ASGI."""
        try:
            await super().__call__(scope, receive, send)
        except ClientDisconnect:
            pass
        finally:
            self._stream.close()


async def _encoded(query: ApiRequest, stream: RequestStream) -> AsyncIterator[bytes]:
    try:
        async for event in query.events(stream):
            yield encoded_event(event, named=not query.ends_with_done)
    except Exception as error:
        if not is_expected(error):
            log.exception("a stream failed")
        answer = api_error(error).as_dict()
        if not query.ends_with_done:
            answer = {"type": "error", **answer}
        yield encoded_event(answer, named=not query.ends_with_done)
    if query.ends_with_done:
        yield b"data: [DONE]\n\n"


def encoded_event(event: Mapping[str, Any], *, named: bool) -> bytes:
    """An event as a client receives it; `named` puts its `type` before it."""
    name = f"event: {event['type']}\n" if named else ""
    data = json.dumps(event, ensure_ascii=False).translate(_ESCAPED)
    return f"{name}data: {data}\n\n".encode()
