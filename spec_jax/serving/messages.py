"""`/v1/messages`: the Anthropic API, turned into a chat and back."""

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from spec_jax.async_llm import RequestStream
from spec_jax.serving.answers import new_id
from spec_jax.serving.chat import ChatCompletion
from spec_jax.serving.errors import ApiError, wrong
from spec_jax.serving.fields import Fields
from spec_jax.serving.service import Service

_ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class Message:
    """A request of the endpoint, and its answer while it comes in; see `ChatCompletion`.

    Args:
      service: the model.
      body: the request's JSON object.

    Attributes:
      streams: whether the answer is a stream of events.
    """

    ends_with_done = False

    def __init__(self, service: Service, body: Mapping[str, Any]):
        fields = Fields(body)
        limit = fields.needed("max_tokens", int)
        chat = conversation(fields) | {"max_tokens": limit, "model": fields.take("model", str)}
        chat["stop"] = fields.take("stop_sequences", list)
        chat |= fields.passed_on()
        self.streams = fields.take("stream", bool, False)
        if self.streams:
            chat |= {"stream": True, "stream_options": {"include_usage": True}}
        fields.take("service_tier", str)
        fields.end()
        self._chat, self._service, self._id = ChatCompletion(service, chat), service, new_id("msg")

    async def submit(self) -> RequestStream:
        """Renders the conversation, and queues it."""
        return await self._chat.submit()

    async def result(self, stream: RequestStream) -> dict[str, Any]:
        """The answer, once it is complete."""
        answer = await self._chat.result(stream)
        (choice,) = answer["choices"]
        message, content = choice["message"], []
        if thought := message.get("reasoning_content"):
            content.append({"type": "thinking", "thinking": thought, "signature": ""})
        if text := message["content"]:
            content.append({"type": "text", "text": text})
        for call in message.get("tool_calls", ()):
            content.append(_tool_use(call) | {"input": _input(call)})
        usage = answer["usage"]
        return self._message(content, usage) | _stop(choice)

    async def events(self, stream: RequestStream) -> AsyncIterator[dict[str, Any]]:
        """The answer as events, which begin and end each block of content."""
        blocks, stop = _Blocks(), {"stop_reason": None, "stop_sequence": None}
        zero = {"prompt_tokens": 0, "completion_tokens": 0, "prompt_tokens_details": {}}
        begun = self._message([], zero) | stop
        yield {"type": "message_start", "message": begun}
        async for event in self._chat.events(stream):
            for choice in event["choices"]:
                for each in blocks.add(choice["delta"]):
                    yield each
                if choice["finish_reason"] is not None:
                    stop = _stop(choice)
            if event.get("usage") is not None:
                for each in blocks.end():
                    yield each
                usage = _usage(event["usage"])
                yield {"type": "message_delta", "delta": stop, "usage": usage}
        yield {"type": "message_stop"}

    def _message(self, content: list[dict[str, Any]], usage: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._service.name,
            "content": content,
            "usage": _usage(usage),
        }


async def count_tokens(service: Service, body: Mapping[str, Any]) -> dict[str, Any]:
    """`/v1/messages/count_tokens`: the tokens of the conversation."""
    fields = Fields(body)
    chat = conversation(fields) | {"model": fields.take("model", str)}
    fields.end()
    return {"input_tokens": len(await ChatCompletion(service, chat).encode())}


def conversation(fields: Fields) -> dict[str, Any]:
    """The fields of the conversation and its tools, as a chat has them."""
    messages: list[dict[str, Any]] = []
    system = fields.take("system", (str, list))
    if system:
        messages.append({"role": "system", "content": _text(system, "system")})
    for message in fields.needed("messages", list):
        messages += _messages(message)
    chat: dict[str, Any] = {"messages": messages}
    if tools := fields.take("tools", list):
        chat["tools"] = [_tool(each) for each in tools]
    if choice := fields.take("tool_choice", dict):
        kinds = {"auto": "auto", "any": "required", "none": "none"}
        named = {"type": "function", "function": {"name": choice.get("name")}}
        chat["tool_choice"] = kinds.get(choice.get("type"), named)
        if choice.get("disable_parallel_tool_use") is True:
            chat["parallel_tool_calls"] = False
    if thinking := fields.take("thinking", dict):
        enabled = thinking.get("type") == "enabled"
        chat["chat_template_kwargs"] = {"enable_thinking": enabled}
    return chat


def error_body(error: ApiError) -> dict[str, Any]:
    """An error in this API's shape."""
    inner = error.as_dict()["error"]
    kind = "api_error" if error.status == 500 else "invalid_request_error"
    kind = _ERRORS.get(error.status, kind)
    return {"type": "error", "error": {"type": kind, "message": inner["message"]}}


class _Blocks:
    """The blocks of content of a stream: one after the other, each with a begin and an end."""

    def __init__(self) -> None:
        self._index, self._kind = -1, ""

    def add(self, delta: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a chat's delta."""
        if thought := delta.get("reasoning_content"):
            yield from self._begin("thinking", {"thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": thought})
        if text := delta.get("content"):
            yield from self._begin("text", {"text": ""})
            yield self._delta({"type": "text_delta", "text": text})
        for call in delta.get("tool_calls", ()):
            yield from self.end()
            yield from self._begin("tool_use", _tool_use(call) | {"input": {}})
            arguments = call["function"]["arguments"]
            yield self._delta({"type": "input_json_delta", "partial_json": arguments})

    def end(self) -> Iterator[dict[str, Any]]:
        """Ends the block that is open."""
        if self._kind:
            self._kind = ""
            yield {"type": "content_block_stop", "index": self._index}

    def _begin(self, kind: str, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self._kind != kind:
            yield from self.end()
            self._kind, self._index = kind, self._index + 1
            block = {"type": kind} | block
            yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _stop(choice: Mapping[str, Any]) -> dict[str, Any]:
    sequence = choice.get("stop_reason")
    sequence = sequence if isinstance(sequence, str) else None
    reason = _STOP_REASONS.get(choice["finish_reason"], "end_turn")
    return {"stop_reason": "stop_sequence" if sequence else reason, "stop_sequence": sequence}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    cached = usage["prompt_tokens_details"].get("cached_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}


def _input(call: Mapping[str, Any]) -> Any:
    try:
        value = json.loads(call["function"]["arguments"])
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {}


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or not isinstance(tool.get("input_schema"), Mapping):
        raise wrong(
            "tools", f"tools holds {str(tool)[:100]}; give a name, a description and input_schema."
        )
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    if "description" in tool:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _messages(message: Any) -> list[dict[str, Any]]:
    """A message as one of a chat, or several: results of tools are messages there."""
    if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant"):
        raise wrong(
            "messages", f"a message is {str(message)[:100]}; give a role, user or assistant."
        )
    role, content = message["role"], message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise wrong("messages", f"a {role} message has no content; give text or blocks.")
    results, calls, texts, thoughts = [], [], [], []
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            texts.append(_text([block], "messages"))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind == "redacted_thinking":
            continue
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input", {}))}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            text = _text(block.get("content") or "", "messages")
            named = {"tool_call_id": block.get("tool_use_id")}
            results.append({"role": "tool", "content": text, **named})
        else:
            raise wrong(
                "messages", f"a block of a {role} message has the type {kind!r}; only text is read."
            )
    answer: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if thoughts:
        answer["reasoning_content"] = "\n".join(thoughts)
    if calls:
        answer["tool_calls"] = calls
    return results + ([answer] if texts or calls or not results else [])


def _text(value: str | Sequence[Any], param: str) -> str:
    if isinstance(value, str):
        return value
    for block in value:
        is_text = isinstance(block, Mapping) and block.get("type") == "text"
        if not is_text or not isinstance(block.get("text"), str):
            raise wrong(param, f"{param} holds {str(block)[:100]}; only blocks of text are read.")
    return "\n".join(block["text"] for block in value)
