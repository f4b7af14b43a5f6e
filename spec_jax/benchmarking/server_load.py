"""How fast a server of the OpenAI API answers: requests that many clients ask, and their times."""

import asyncio
import dataclasses
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import httpx2

from spec_jax.benchmarking.prompts import BenchPrompt
from spec_jax.errors import ConfigError, RequestError
from spec_jax.text.server_events import EventReader, message_of

CONNECT_SECONDS, ANSWER_SECONDS = 10, 600
"""The longest waits for a connection, and between two pieces of an answer."""


FIRST_TOKEN, MIN_VOCABULARY = 100, 30_000
"""Random tokens are not among the first ones, which may be special; most models have as many as the
second, if a server does not tell."""


class Question(NamedTuple):
    """A request: its path and the fields that are not the same for all."""

    path: str
    fields: Mapping[str, Any]

    @classmethod
    def of(cls, prompt: BenchPrompt) -> "Question":
        """A prompt, asked through the chat template or as it is."""
        if prompt.chat:
            messages = [{"role": "user", "content": prompt.text}]
            return cls("/v1/chat/completions", {"messages": messages})
        return cls("/v1/completions", {"prompt": prompt.text})

    @classmethod
    def of_length(
        cls, num_tokens: int, num_answer: int, vocab_size: int, rng: random.Random
    ) -> "Question":
        """Random tokens, and the length of the answer."""
        ids = [rng.randrange(FIRST_TOKEN, vocab_size) for _ in range(num_tokens)]
        fields = {"prompt": ids, "max_tokens": num_answer, "ignore_eos": True}
        return cls("/v1/completions", fields)


@dataclasses.dataclass
class ServedAnswer:
    """A request's times, in seconds from the begin of its load.

    Attributes:
      begin: when it was sent.
      first: when the first piece of text came; None if none did.
      ended: when it ended.
      pieces: of text that came.
      num_tokens: tokens of the answer; its pieces where the server does not count tokens.
      prompt_tokens: tokens of the prompt.
      drafted, accepted: drafted tokens and the accepted ones, where the server tells.
      error: what went wrong; None for nothing.
    """

    begin: float
    first: float | None = None
    ended: float = 0.0
    pieces: int = 0
    num_tokens: int = 0
    prompt_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    error: str | None = None

    @property
    def first_seconds(self) -> float:
        """Seconds to the first piece."""
        return (self.ended if self.first is None else self.first) - self.begin

    @property
    def token_seconds(self) -> float:
        """Seconds of each token after the first piece, on average."""
        since = self.ended - self.begin - self.first_seconds
        return since / max(self.num_tokens - 1, 1)


class LoadClient:
    """Asks a server.

    Args:
      url: the server's, with or without `/v1` at its end.
      api_key: what it asks for; None for nothing.
      fields: of each request.
    """

    def __init__(self, url: str, api_key: str | None, fields: Mapping[str, Any]):
        self._url, self._fields = url, {**fields, "stream": True}
        self._fields["stream_options"] = {"include_usage": True}
        self._client = httpx2.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=httpx2.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
            limits=httpx2.Limits(max_connections=None),
        )

    async def __aenter__(self) -> "LoadClient":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()

    async def choose_model(self, name: str | None) -> int:
        """Asks for a model of this name from now on, or for the server's first one.

        Returns:
          The size of its vocabulary, or how many tokens most models have.

        Raises:
          ConfigError: the server cannot be reached.
        """
        try:
            response = await self._client.get("/v1/models")
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ConfigError(f"cannot reach {self._url}: {error}; check --serve.") from error
        if not response.is_success:
            message = message_of(response.status_code, response.content)
            raise ConfigError(f"{self._url}: {message}")
        models = response.json().get("data") or [{}]
        self._fields["model"] = name or str(models[0].get("id", ""))
        meta = models[0].get("meta") or {}
        return int(meta.get("n_vocab") or MIN_VOCABULARY)

    async def ask(self, question: Question, began: float) -> ServedAnswer:
        """Asks one question and waits for the whole answer."""
        answer = ServedAnswer(begin=time.perf_counter() - began)
        body = {**self._fields, **question.fields}
        try:
            async with self._client.stream("POST", question.path, json=body) as response:
                if not response.is_success:
                    answer.error = message_of(response.status_code, await response.aread())
                else:
                    reader = EventReader()
                    async for text in response.aiter_text():
                        for event in reader.events(text):
                            _take(answer, event, time.perf_counter() - began)
        except (httpx2.HTTPError, RequestError, json.JSONDecodeError) as error:
            answer.error = str(error) or type(error).__name__
        answer.ended = time.perf_counter() - began
        answer.num_tokens = answer.num_tokens or answer.pieces
        return answer


def _take(answer: ServedAnswer, event: Mapping[str, Any], now: float) -> None:
    """Adds what an event of a stream tells."""
    if usage := event.get("usage"):
        answer.num_tokens = usage.get("completion_tokens", 0)
        answer.prompt_tokens = usage.get("prompt_tokens", 0)
    for choice in event.get("choices", ()):
        delta = choice.get("delta", {})
        text = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
        if text:
            answer.pieces += 1
            answer.first = now if answer.first is None else answer.first
        if statistics := choice.get("speculative_decoding_stats"):
            answer.drafted = statistics.get("num_draft_tokens", 0)
            answer.accepted = statistics.get("num_accepted_draft_tokens", 0)


async def closed_loop(
    client: LoadClient,
    questions: Sequence[Question],
    concurrency: int,
    on_answer: Callable[[], None] = lambda: None,
) -> list[ServedAnswer]:
    """The answers to the questions of some clients, each of which asks again once it has one."""
    began, left, answers = time.perf_counter(), iter(questions), []

    async def one() -> None:
        for question in left:
            answers.append(await client.ask(question, began))
            on_answer()

    await asyncio.gather(*(one() for _ in range(concurrency)))
    return answers


async def open_loop(
    client: LoadClient,
    questions: Sequence[Question],
    rate: float,
    rng: random.Random,
    on_answer: Callable[[], None] = lambda: None,
) -> list[ServedAnswer]:
    """The answers to questions that come at random, `rate` a second (Poisson)."""
    began, now, arrivals = time.perf_counter(), 0.0, []
    for _ in questions:
        now += rng.expovariate(rate)
        arrivals.append(now)

    async def one(question: Question, at: float) -> ServedAnswer:
        await asyncio.sleep(max(0.0, at - (time.perf_counter() - began)))
        answer = await client.ask(question, began)
        on_answer()
        return answer

    pairs = zip(questions, arrivals, strict=True)
    return [*await asyncio.gather(*(one(*pair) for pair in pairs))]


class Summary(NamedTuple):
    """The figures of a load.

    Attributes:
      num_failed: requests that ended with an error.
      tokens_per_second: of all answers together.
      first, token: median and 99th percentile of the seconds to the first piece, and of each token
        after it.
      goodput: answers a second that kept both limits.
      acceptance: the accepted part of drafted tokens; None without any.
    """

    num_failed: int
    tokens_per_second: float
    first: tuple[float, float]
    token: tuple[float, float]
    goodput: float
    acceptance: float | None

    @classmethod
    def of(
        cls, answers: Sequence[ServedAnswer], first_limit: float, token_limit: float
    ) -> "Summary":
        """Of the answers of a load; the limits are in seconds."""
        good = [each for each in answers if each.error is None]
        seconds = max(each.ended for each in answers) - min(each.begin for each in answers)
        good_in_time = [
            each
            for each in good
            if each.first_seconds <= first_limit and each.token_seconds <= token_limit
        ]
        drafted = sum(each.drafted for each in good)
        return cls(
            len(answers) - len(good),
            sum(each.num_tokens for each in good) / seconds,
            _percentiles([each.first_seconds for each in good]),
            _percentiles([each.token_seconds for each in good if each.num_tokens > 1]),
            len(good_in_time) / seconds,
            sum(each.accepted for each in good) / drafted if drafted else None,
        )


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    """The median and the 99th percentile: the smallest value that this share does not exceed."""
    ordered = sorted(values)
    if not ordered:
        return 0.0, 0.0
    return ordered[(len(ordered) - 1) // 2], ordered[-(-99 * len(ordered) // 100) - 1]
