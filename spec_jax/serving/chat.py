"""`/v1/chat/completions`: a conversation is continued."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from spec_jax.async_llm import RequestStream
from spec_jax.outputs import StreamChunk
from spec_jax.serving.answers import UsageCounter, new_id, speculation
from spec_jax.serving.errors import wrong
from spec_jax.serving.fields import Fields, checked_logprobs, structure
from spec_jax.serving.logprobs import chat_logprobs
from spec_jax.serving.parsing import AnswerParser, Delta, ToolCall
from spec_jax.serving.service import Service
from spec_jax.serving.tools import Tools


class ChatCompletion:
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
        self._service, self._id, self._created = service, new_id("chatcmpl"), int(time.time())
        self._messages = [
            _for_template(each, service.knows_developer) for each in fields.needed("messages", list)
        ]
        self.streams = fields.take("stream", bool, False)
        self._drafting: dict[str, Any] = {
            "may_draft": fields.take("speculative", bool, True),
            "prediction": _prediction(fields.take("prediction", dict)),
        }
        self._include_usage = fields.include_usage(self.streams)
        self._template = _template_options(fields)
        self._top = _top_logprobs(fields)
        self._with_ids = fields.take("return_token_ids", bool, False)
        self._with_sources = fields.take("return_token_sources", bool, False)
        form = structure(fields.take("response_format", dict))
        self._tools = Tools.of(fields, service.tool_format)
        changed: dict[str, Any] = {"logprobs": self._top}
        if form is not None:
            changed["structured_outputs"] = form
        if self._tools.schema is not None:
            if form is not None:
                raise wrong(
                    "tool_choice",
                    "tool_choice asks for a call, and response_format for another form; leave one "
                    "of the two out.",
                )
            changed["structured_outputs"] = {"json": self._tools.schema}
        if self._tools.format == "mistral":
            changed["skip_special_tokens"] = False  # the format's markers are special tokens
        limit = fields.take("max_completion_tokens", int)
        if limit is not None:
            changed["max_tokens"] = limit
        self._sampling = fields.sampling(service.defaults(None), **changed)
        fields.end()
        self._usage = UsageCounter(has_prediction=bool(self._drafting["prediction"]))
        self._choices: dict[int, _Choice] = {}
        self._within_reasoning = False

    async def encode(self) -> list[int]:
        """The tokens of the conversation."""
        tokenizer = self._service.tokenizer
        tools = self._tools.described or None
        text = await asyncio.to_thread(
            tokenizer.apply_chat_template, self._messages, tools=tools, **self._template
        )
        self._within_reasoning = self._service.reasons and text.rstrip().endswith("<think>")
        return await asyncio.to_thread(self._service.engine.llm.encode_prompt, text)

    async def submit(self) -> RequestStream:
        """Renders the conversation, and queues it."""
        return await self._service.submit([await self.encode()], self._sampling, **self._drafting)

    async def result(self, stream: RequestStream) -> dict[str, Any]:
        """The answer, once it is complete."""
        async for chunk in self._service.chunks(stream):
            self._add(chunk)
        choices = [self._choices[index].result() for index in sorted(self._choices)]
        return self._envelope("chat.completion", choices) | {"usage": self._usage_dict()}

    async def events(self, stream: RequestStream) -> AsyncIterator[dict[str, Any]]:
        """The answer as events: first the role, at the end why it ended."""
        extra = {"usage": None} if self._include_usage else {}
        for index in range(self._sampling.n):
            first = {"index": index, "delta": {"role": "assistant", "content": ""}}
            yield self._chunk([first | {"logprobs": None, "finish_reason": None}]) | extra
        async for chunk in self._service.chunks(stream):
            for choice in self._add(chunk):
                yield self._chunk([choice]) | extra
        if extra:
            yield self._chunk([]) | {"usage": self._usage_dict()}

    def _add(self, chunk: StreamChunk) -> list[dict[str, Any]]:
        """Takes a chunk in, and returns what choices of events tell of it."""
        if chunk.sample not in self._choices:
            parser = AnswerParser(
                reasoning=self._service.reasons and self._tools.schema is None,
                within=self._within_reasoning,
                tools=self._tools.format,
                names=self._tools.names,
            )
            self._choices[chunk.sample] = _Choice(self, chunk.sample, parser)
        if chunk.output is not None:
            self._usage.add(chunk.index, chunk.output)
        return self._choices[chunk.sample].add(chunk)

    def _usage_dict(self) -> dict[str, Any]:
        encode = self._service.tokenizer.encode
        thoughts = (each.reasoning for each in self._choices.values() if each.reasoning)
        self._usage.reasoning = sum(len(encode(each, False)) for each in thoughts)
        return self._usage.as_dict()

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._envelope("chat.completion.chunk", choices)

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._service.name,
            "choices": choices,
        }


class _Choice:
    """One of the answers."""

    def __init__(self, request: ChatCompletion, index: int, parser: AnswerParser):
        self._request, self._index, self._parser = request, index, parser
        self._tokenizer = request._service.tokenizer
        self._content, self.reasoning = "", ""
        self._calls: list[ToolCall] = []
        self._logprobs: list[dict[str, Any]] = []
        self._shown = 0  # entries of the log-probabilities that an event had
        self._token_ids: list[int] = []
        self._ids_shown = 0
        self._end: dict[str, Any] = {"finish_reason": None}
        self._sources = self._tokenizer.stream() if request._with_sources else None

    def add(self, chunk: StreamChunk) -> list[dict[str, Any]]:
        """Takes a chunk in, and returns choices of events."""
        request, text = self._request, chunk.text
        self._token_ids += chunk.token_ids
        if chunk.output is not None and not request._sampling.skip_special_tokens:
            text = text.removesuffix(self._last_token())
        if request._top is not None and chunk.logprobs is not None:
            entries = (self._tokenizer, chunk.token_ids, chunk.logprobs, request._top)
            self._logprobs += chat_logprobs(*entries)
        deltas = self._parser.feed(text)
        if chunk.output is not None:
            deltas += self._parser.finish()
        choices = [self._event(self._take(each)) for each in deltas]
        if self._sources is not None and chunk.token_ids:
            pieces = [
                [self._sources.push([token]), drafted]
                for token, drafted in zip(chunk.token_ids, chunk.drafted, strict=True)
            ]
            if not choices:
                choices.append(self._event({}))
            choices[0]["token_sources"] = pieces
        if chunk.output is not None:
            completion = chunk.output.outputs[0]
            reason: str = completion.finish_reason
            if self._calls and reason == "stop":
                reason = "tool_calls"
            self._end = {
                "finish_reason": reason,
                "stop_reason": completion.stop_reason,
                "speculative_decoding_stats": speculation(completion.metrics),
            }
            choices.append(self._event({}) | self._end)
        return choices

    def _last_token(self) -> str:
        """The text of a token that ended the answer."""
        last = self._token_ids[-1:]
        special = self._tokenizer.special_tokens
        return special.get(last[0], "") if last else ""

    def _take(self, delta: Delta) -> dict[str, Any]:
        """Adds a piece to the answer; returns it as an event's `delta`."""
        if (call := delta.tool_call) is not None:
            self._calls.append(call)
            return {"tool_calls": [{"index": len(self._calls) - 1, **_call(call)}]}
        if delta.reasoning:
            self.reasoning += delta.reasoning
            return {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}
        self._content += delta.content
        return {"content": delta.content}

    def _event(self, delta: dict[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": self._index, "delta": delta, "logprobs": None}
        if self._logprobs[self._shown :]:
            choice["logprobs"] = {"content": self._logprobs[self._shown :], "refusal": None}
            self._shown = len(self._logprobs)
        if self._request._with_ids:
            choice["token_ids"] = self._token_ids[self._ids_shown :]
            self._ids_shown = len(self._token_ids)
        return choice | {"finish_reason": None}

    def result(self) -> dict[str, Any]:
        """The choice of the complete answer."""
        message: dict[str, Any] = {"role": "assistant", "content": self._content, "refusal": None}
        if self.reasoning:
            message |= {"reasoning_content": self.reasoning, "reasoning": self.reasoning}
        if self._calls:
            message["content"] = self._content or None
            message["tool_calls"] = [_call(each) for each in self._calls]
        choice = {"index": self._index, "message": message, "logprobs": None, **self._end}
        if self._request._top is not None:
            choice["logprobs"] = {"content": self._logprobs, "refusal": None}
        if self._request._with_ids:
            choice["token_ids"] = self._token_ids
        return choice


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _prediction(field: Mapping[str, Any] | None) -> str:
    """The text of OpenAI's predicted output; empty without one."""
    if field is None:
        return ""
    content = field.get("content")
    if isinstance(content, list):
        parts = [each.get("text") for each in content if isinstance(each, Mapping)]
        texts = [each for each in parts if isinstance(each, str)]
        content = "".join(texts) if len(texts) == len(content) else None
    if field.get("type") != "content" or not isinstance(content, str):
        raise wrong(
            "prediction",
            "prediction is not understood; give {'type': 'content', 'content': a text}.",
        )
    return content


def _top_logprobs(fields: Fields) -> int | None:
    has_logprobs = fields.take("logprobs", bool, False)
    top = checked_logprobs("top_logprobs", fields.take("top_logprobs", int))
    if top and not has_logprobs:
        raise wrong("top_logprobs", f"top_logprobs is {top}, and logprobs is not true; set it.")
    return (top or 0) if has_logprobs else None


def _template_options(fields: Fields) -> dict[str, Any]:
    continues = fields.take("continue_final_message", bool, False)
    generates = fields.take("add_generation_prompt", bool, not continues)
    variables = fields.take("chat_template_kwargs", dict, {})
    if (effort := fields.take("reasoning_effort", str)) is not None:
        variables = {"reasoning_effort": effort} | variables
    return {
        "add_generation_prompt": generates,
        "continue_final_message": continues,
        "chat_template_kwargs": variables,
    }


def _for_template(message: Any, knows_developer: bool) -> Any:
    """A message as chat templates expect it; what is wrong with it is found when it is rendered."""
    if not isinstance(message, Mapping):
        return message
    message = {name: value for name, value in message.items() if value is not None}
    if message.get("role") == "developer" and not knows_developer:
        message["role"] = "system"
    if isinstance(calls := message.get("tool_calls"), Sequence) and not isinstance(calls, str):
        message["tool_calls"] = [_with_values(each) for each in calls]
    if message.get("role") == "assistant" and "content" not in message:
        message["content"] = ""
    return message


def _with_values(call: Any) -> Any:
    """A call whose arguments are values; the API has them as JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(text := function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
