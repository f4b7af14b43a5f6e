"""`/v1/responses`: OpenAI's newer API, turned into a chat and back. Nothing is stored."""

import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from spec_jax.async_llm import RequestStream
from spec_jax.serving.answers import new_id
from spec_jax.serving.chat import ChatCompletion
from spec_jax.serving.errors import wrong
from spec_jax.serving.fields import Fields
from spec_jax.serving.service import Service

_WITHOUT_EFFECT = (
    *("store", "include", "truncation", "background", "max_tool_calls", "prompt_cache_options"),
    *("stream_options", "context_management"),
)


class ResponseRequest:
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
        for name in ("previous_response_id", "conversation", "prompt"):
            if fields.take(name, (str, dict)) is not None:
                message = (
                    f"{name} is given, and nothing is stored here; send all messages as input."
                )
                raise wrong(name, message)
        if fields.take("background", bool, False):
            raise wrong(
                "background", "background is true; an answer is given at once, or streamed."
            )
        for name in _WITHOUT_EFFECT:
            fields.take(name, (str, int, float, bool, list, dict))
        self._instructions = fields.take("instructions", (str, list))
        messages = _messages(self._instructions, fields.needed("input", (str, list)))
        chat: dict[str, Any] = {"messages": messages, "model": fields.take("model", str)}
        chat["max_completion_tokens"] = self._limit = fields.take("max_output_tokens", int)
        chat |= fields.passed_on()
        self._temperature, self._top_p = chat.get("temperature"), chat.get("top_p")
        if fields.take("top_logprobs", int):
            message = "top_logprobs is not given here; ask /v1/chat/completions for them."
            raise wrong("top_logprobs", message)
        format = fields.take("text", dict, {}).get("format")
        if format is not None:
            if not isinstance(format, Mapping):
                raise wrong("text", f"text has the format {str(format)[:100]}; give an object.")
            chat["response_format"] = format
        reasoning = fields.take("reasoning", dict, {})
        if isinstance(effort := reasoning.get("effort"), str):
            chat["reasoning_effort"] = effort
        self._tools = fields.take("tools", list, [])
        self._tool_choice = fields.take("tool_choice", (str, dict), "auto")
        self._parallel = fields.take("parallel_tool_calls", bool, True)
        if self._tools:
            chat["tools"] = [_tool(each) for each in self._tools]
            chat["parallel_tool_calls"] = self._parallel
            chat["tool_choice"] = _choice(self._tool_choice)
        self._metadata = fields.take("metadata", dict, {})
        self.streams = fields.take("stream", bool, False)
        if self.streams:
            chat |= {"stream": True, "stream_options": {"include_usage": True}}
        fields.end()
        self._chat, self._service = ChatCompletion(service, chat), service
        self._id, self._created = new_id("resp"), int(time.time())

    async def submit(self) -> RequestStream:
        """Renders the conversation, and queues it."""
        return await self._chat.submit()

    async def result(self, stream: RequestStream) -> dict[str, Any]:
        """The answer, once it is complete."""
        answer = await self._chat.result(stream)
        (choice,) = answer["choices"]
        items = _Items()
        message = choice["message"]
        for _ in items.add(message | {"role": None}):
            pass
        for _ in items.end():
            pass
        return self._response(items.complete, choice["finish_reason"], answer["usage"])

    async def events(self, stream: RequestStream) -> AsyncIterator[dict[str, Any]]:
        """The answer as events, numbered in order."""
        number, items, reason = 0, _Items(), None

        def numbered(event: dict[str, Any]) -> dict[str, Any]:
            nonlocal number
            number += 1
            return event | {"sequence_number": number - 1}

        begun = self._response([], None, None)
        for kind in ("response.created", "response.in_progress"):
            yield numbered({"type": kind, "response": begun})
        usage = None
        async for event in self._chat.events(stream):
            for choice in event["choices"]:
                for each in items.add(choice["delta"]):
                    yield numbered(each)
                reason = choice["finish_reason"] or reason
            usage = event.get("usage") or usage
        for each in items.end():
            yield numbered(each)
        response = self._response(items.complete, reason, usage)
        kind = "response.incomplete" if reason == "length" else "response.completed"
        yield numbered({"type": kind, "response": response})

    def _response(
        self, output: list[dict[str, Any]], reason: str | None, usage: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        statuses = {None: "in_progress", "length": "incomplete"}
        is_cut = {"reason": "max_output_tokens"} if reason == "length" else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": statuses.get(reason, "completed"),
            "error": None,
            "incomplete_details": is_cut,
            "instructions": self._instructions,
            "max_output_tokens": self._limit,
            "model": self._service.name,
            "output": output,
            "parallel_tool_calls": self._parallel,
            "previous_response_id": None,
            "store": False,
            "temperature": self._temperature,
            "top_p": self._top_p,
            "tool_choice": self._tool_choice,
            "tools": self._tools,
            "metadata": self._metadata,
            "usage": usage
            and {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {
                    "reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]
                },
                "total_tokens": usage["total_tokens"],
            },
        }


class _Items:
    """The items of an answer: reasoning, text, calls; each is begun, filled and ended.

    Attributes:
      complete: those that have ended.
    """

    def __init__(self) -> None:
        self.complete: list[dict[str, Any]] = []
        self._item: dict[str, Any] | None = None

    def add(self, delta: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a chat's delta, or of its whole message."""
        if thought := delta.get("reasoning_content"):
            yield from self._text("reasoning", "reasoning_text", thought)
        if text := delta.get("content"):
            yield from self._text("message", "output_text", text)
        for call in delta.get("tool_calls", ()):
            yield from self.end()
            function = call["function"]
            item = {"type": "function_call", "id": new_id("fc"), "call_id": call["id"]}
            item |= {"name": function["name"], "arguments": "", "status": "in_progress"}
            yield from self._begin(item)
            item["arguments"] = function["arguments"]
            at = {"item_id": item["id"], "output_index": len(self.complete)}
            kind = "response.function_call_arguments"
            yield {"type": f"{kind}.delta", "delta": item["arguments"], **at}
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield {"type": f"{kind}.done", **done, **at}
            yield from self.end()

    def end(self) -> Iterator[dict[str, Any]]:
        """Ends the item that is open."""
        item, self._item = self._item, None
        if item is None:
            return
        if item["type"] != "function_call":
            (part,) = item["content"]
            at = self._place(item)
            yield {"type": f"response.{part['type']}.done", "text": part["text"], **at, **_MORE}
            yield {"type": "response.content_part.done", "part": dict(part), **at}
        item["status"] = "completed"
        yield {
            "type": "response.output_item.done",
            "item": item,
            "output_index": len(self.complete),
        }
        self.complete.append(item)

    def _text(self, kind: str, part_kind: str, text: str) -> Iterator[dict[str, Any]]:
        if self._item is None or self._item["type"] != kind:
            yield from self.end()
            item: dict[str, Any] = {
                "type": kind,
                "id": new_id("rs" if kind != "message" else "msg"),
            }
            item |= {"status": "in_progress", "content": []}
            item |= {"summary": []} if kind == "reasoning" else {"role": "assistant"}
            yield from self._begin(item)
            part: dict[str, Any] = {"type": part_kind, "text": ""}
            part |= {"annotations": [], "logprobs": []} if kind == "message" else {}
            at = self._place(item)
            yield {"type": "response.content_part.added", "part": dict(part), **at}
            item["content"] = [part]
        assert self._item is not None
        self._item["content"][0]["text"] += text
        at = self._place(self._item)
        yield {"type": f"response.{part_kind}.delta", "delta": text, **at, **_MORE}

    def _begin(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._item = item
        index = len(self.complete)
        yield {"type": "response.output_item.added", "item": dict(item), "output_index": index}

    def _place(self, item: Mapping[str, Any]) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self.complete), "content_index": 0}


_MORE: dict[str, Any] = {"logprobs": []}


def _messages(instructions: Any, items: Any) -> list[dict[str, Any]]:
    """The input as messages of a chat."""
    messages: list[dict[str, Any]] = []
    if isinstance(instructions, str):
        messages.append({"role": "system", "content": instructions})
    elif instructions:
        raise wrong("instructions", "instructions is a list; give a text.")
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    for item in items:
        messages.append(_message(item))
    return _joined(messages)


def _message(item: Any) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise wrong("input", f"input holds {str(item)[:100]}; give messages.")
    kind = item.get("type", "message")
    if kind == "message":
        return {"role": item.get("role"), "content": _text(item.get("content"))}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        output = item.get("output")
        text = _text(output) if isinstance(output, str | list) else json.dumps(output)
        return {"role": "tool", "content": text, "tool_call_id": item.get("call_id")}
    if kind == "reasoning":
        texts = (each.get("text", "") for each in item.get("content") or ())
        return {"role": "assistant", "content": "", "reasoning_content": "".join(texts)}
    raise wrong("input", f"input holds an item of the type {kind!r}; only text and calls are read.")


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with one message for each answer: reasoning, text and calls are items there."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        last = joined[-1] if joined else {}
        if message["role"] != "assistant" or last.get("role") != "assistant":
            joined.append(message)
            continue
        last["content"] = "\n".join(filter(None, (last["content"], message["content"])))
        for name in ("tool_calls", "reasoning_content"):
            if name in message:
                last[name] = last.get(name, type(message[name])()) + message[name]
    return joined


def _text(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("input_text", "output_text", "text", "summary_text"):
            raise wrong("input", f"a part of input has the type {kind!r}; only text is read.")
        if not isinstance(part.get("text"), str):
            raise wrong("input", f"a part of input is {str(part)[:100]}; give it a text.")
    return "\n".join(part["text"] for part in content)


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise wrong("tools", f"tools holds {str(tool)[:100]}; only functions are called.")
    names = ("name", "description", "parameters", "strict")
    function = {each: tool[each] for each in names if tool.get(each) is not None}
    return {"type": "function", "function": function}


def _choice(choice: str | Mapping[str, Any]) -> Any:
    if isinstance(choice, str):
        return choice
    return {"type": "function", "function": {"name": choice.get("name")}}
