"""`spec-jax chat --url`: a conversation with a server of the OpenAI API."""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import httpx2

from spec_jax.cli.chat import Chat
from spec_jax.cli.conversation import Conversation
from spec_jax.cli.screen import Screen
from spec_jax.cli.server_options import ChatUrlOptions
from spec_jax.errors import ConfigError, RequestError
from spec_jax.text.server_events import EventReader, message_of

CONNECT_SECONDS, ANSWER_SECONDS = 10, 600
"""The longest waits for a connection, and between two pieces of an answer."""


def run(options: ChatUrlOptions, screen: Screen) -> int:
    """Converses until the input ends; returns the exit code."""
    if sys.stdin is None:
        raise ConfigError("standard input is closed; chat reads the messages there.")
    with Remote(options.url, options.api_key, options.model, options.fields) as remote:
        conversation = Conversation(lambda messages: messages, options.system)
        screen.settle()
        return Chat(remote, conversation, screen).run()


class Remote:
    """Answers with the model of a server.

    Args:
      url: the server's, with or without `/v1` at its end.
      api_key: what it asks for; None for nothing.
      model: the model's name; the server's first one if None.
      fields: of each request, besides the messages.

    Raises:
      ConfigError: the server cannot be reached, or serves no such model.
    """

    def __init__(self, url: str, api_key: str | None, model: str | None, fields: Mapping[str, Any]):
        self._url = url
        self._client = httpx2.Client(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=httpx2.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
        )
        self._fields = {"model": model or self._first_model(), **fields}
        self._statistics: list[str] = []

    def __enter__(self) -> "Remote":
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def _first_model(self) -> str:
        try:
            response = self._client.get("/v1/models")
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ConfigError(f"cannot reach {self._url}: {error}; check --url.") from error
        if not response.is_success:
            raise ConfigError(f"{self._url}: {message_of(response.status_code, response.content)}")
        models = response.json().get("data") or [{}]
        return str(models[0].get("id", ""))

    def prepare(self) -> None:
        """Nothing: the server compiles."""

    def answer(self, prompt: Sequence[Mapping[str, str]]) -> Iterator[str]:
        """The pieces of an answer to the messages."""
        body = {"messages": prompt, "stream": True, "stream_options": {"include_usage": True}}
        self._statistics, began, first = [], time.perf_counter(), None
        usage: Mapping[str, Any] = {}
        choice: Mapping[str, Any] = {}
        try:
            with self._client.stream(
                "POST", "/v1/chat/completions", json=self._fields | body
            ) as response:
                if not response.is_success:
                    raise RequestError(message_of(response.status_code, response.read()))
                reader = EventReader()
                for event in chain.from_iterable(map(reader.events, response.iter_text())):
                    usage = event.get("usage") or usage
                    for choice in event.get("choices", ()):
                        delta = choice.get("delta", {})
                        if piece := delta.get("content") or delta.get("reasoning_content"):
                            first = first or time.perf_counter()
                            yield piece
        except (httpx2.HTTPError, json.JSONDecodeError) as error:
            raise RequestError(f"the answer of {self._url} broke off: {error}") from error
        self._statistics = [*_statistics(usage, choice, time.perf_counter() - (first or began))]

    def statistics(self) -> Sequence[str]:
        """Of the last answer, as far as the server tells."""
        return self._statistics


def _statistics(
    usage: Mapping[str, Any], choice: Mapping[str, Any], seconds: float
) -> Iterator[str]:
    count = usage.get("completion_tokens")
    if count:
        yield f"{count} tokens"
    if length := choice.get("speculative_decoding_stats", {}).get("mean_acceptance_length"):
        yield f"{length:.2f} per target call"
    if count and seconds:
        yield f"{count / seconds:.1f} per second"
    if choice.get("finish_reason") == "length":
        yield "cut at --max-tokens, or the context is full"
