"""`/v1/completions`: text is continued."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from spec_jax.async_llm import RequestStream
from spec_jax.engine.request_builder import Prompt
from spec_jax.outputs import CompletionOutput, StreamChunk
from spec_jax.serving.answers import UsageCounter, new_id, speculation
from spec_jax.serving.errors import wrong
from spec_jax.serving.fields import Fields, checked_logprobs, structure
from spec_jax.serving.logprobs import CompletionLogprobs, Place
from spec_jax.serving.service import Service

MAX_TOKENS = 16
"""Tokens of a request that does not say how many, as in the OpenAI API."""


class TextCompletion:
    """A request of the endpoint, and its answer while it comes in.

    Args:
      service: the model.
      body: the request's JSON object.

    Attributes:
      streams: whether the answer is a stream of events.
    """

    ends_with_done = True

    def __init__(self, service: Service, body: Mapping[str, Any]):
        fields = Fields(body)
        service.check_model(fields)
        self._service, self._id, self._created = service, new_id("cmpl"), int(time.time())
        self._prompts = _prompts(fields.needed("prompt", (str, list)))
        self.streams = fields.take("stream", bool, False)
        self._may_draft = fields.take("speculative", bool, True)
        self._include_usage = fields.include_usage(self.streams)
        self._echo = fields.take("echo", bool, False)
        self._top = checked_logprobs("logprobs", fields.take("logprobs", int))
        self._with_ids = fields.take("return_token_ids", bool, False)
        changed: dict[str, Any] = {"logprobs": self._top}
        if (form := structure(fields.take("response_format", dict))) is not None:
            changed["structured_outputs"] = form
        # Scoring a prompt without answering it: one token is made, and dropped.
        self._answers = body.get("max_tokens") != 0 or isinstance(body.get("max_tokens"), bool)
        if not self._answers:
            if not self._echo:
                raise wrong("max_tokens", "max_tokens is 0; give at least 1, or echo true.")
            changed["max_tokens"] = 1
        if self._echo and self._top is not None:
            changed["prompt_logprobs"] = self._top
        self._sampling = fields.sampling(service.defaults(MAX_TOKENS), **changed)
        fields.end()
        self._usage = UsageCounter()

    async def submit(self) -> RequestStream:
        """Queues it."""
        return await self._service.submit(self._prompts, self._sampling, may_draft=self._may_draft)

    async def result(self, stream: RequestStream) -> dict[str, Any]:
        """The answer, once it is complete."""
        choices: dict[int, dict[str, Any]] = {}
        async for chunk in self._service.chunks(stream):
            if (output := chunk.output) is None:
                continue
            self._usage.add(chunk.index, output)
            completion = output.outputs[0]
            complete = dataclasses.replace(
                chunk,
                text=completion.text,
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                prompt_token_ids=output.prompt_token_ids,
                prompt_logprobs=output.prompt_logprobs,
            )
            choice = await self._choice(complete, self._logprobs()) | self._end(completion)
            choices[choice["index"]] = choice
        ordered = [choices[index] for index in sorted(choices)]
        return self._envelope(ordered) | {"usage": self._usage.as_dict()}

    async def events(self, stream: RequestStream) -> AsyncIterator[dict[str, Any]]:
        """The answer as events."""
        logprobs: dict[tuple[int, int], CompletionLogprobs] = {}
        extra = {"usage": None} if self._include_usage else {}
        async for chunk in self._service.chunks(stream):
            key = chunk.index, chunk.sample
            choice = await self._choice(chunk, logprobs.setdefault(key, self._logprobs()))
            if chunk.output is not None:
                self._usage.add(chunk.index, chunk.output)
                choice |= self._end(chunk.output.outputs[0])
            elif not choice["text"] and choice["logprobs"] is None and not self._with_ids:
                continue
            yield self._envelope([choice]) | extra
        if extra:
            yield self._envelope([]) | {"usage": self._usage.as_dict()}

    def _logprobs(self) -> CompletionLogprobs:
        return CompletionLogprobs(self._service.tokenizer, self._top or 0)

    async def _choice(self, chunk: StreamChunk, logprobs: CompletionLogprobs) -> dict[str, Any]:
        """What a chunk adds to its choice; the first one adds the prompt, if it is echoed."""
        if not self._answers:
            chunk = dataclasses.replace(chunk, text="", token_ids=(), logprobs=())
        prompt, text, ids = chunk.prompt_token_ids, chunk.text, chunk.token_ids
        places: Sequence[Place | None] = chunk.logprobs or ()
        if self._echo and prompt:
            text = await self._prompt_text(chunk.index, prompt) + text
            ids, places = (*prompt, *ids), (*(chunk.prompt_logprobs or ()), *places)
        choice: dict[str, Any] = {
            "index": chunk.index * self._sampling.n + chunk.sample,
            "text": text,
            "logprobs": logprobs.of(ids, places) if places else None,
            "finish_reason": None,
        }
        if self._with_ids:
            choice["token_ids"] = list(chunk.token_ids)
            if prompt:
                choice["prompt_token_ids"] = list(prompt)
        return choice

    def _end(self, completion: CompletionOutput) -> dict[str, Any]:
        return {
            "finish_reason": completion.finish_reason if self._answers else "length",
            "stop_reason": completion.stop_reason,
            "speculative_decoding_stats": speculation(completion.metrics),
        }

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._service.name,
            "choices": choices,
        }

    async def _prompt_text(self, index: int, ids: Sequence[int]) -> str:
        prompt = self._prompts[index]
        if isinstance(prompt, str):
            return prompt
        return await asyncio.to_thread(self._service.tokenizer.decode, list(ids))


def _prompts(value: Any) -> list[Prompt]:
    """One or several prompts, each a text or token ids."""
    if isinstance(value, str):
        return [value]
    if not value:
        raise wrong("prompt", "prompt is an empty list; give a text or token ids.")
    if all(isinstance(each, int) and not isinstance(each, bool) for each in value):
        return [value]
    for each in value:
        if not isinstance(each, str | list):
            raise wrong("prompt", "prompt mixes kinds; give texts, token ids, or lists of them.")
    return value
