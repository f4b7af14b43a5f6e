"""What an answer consists of: reasoning, text and calls of tools, found while it is generated.

A parser takes text in pieces of any size, and what it returns for all pieces together does not
depend on where they were cut: a draft brings several tokens at once.
"""

import dataclasses
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

Format = Literal["hermes", "llama3", "mistral", "json"]

MARKERS: dict[str, str] = {
    "hermes": "<tool_call>",
    "llama3": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
}
"""What begins a call of a tool in each format, by which a chat template shows its format."""


@dataclasses.dataclass
class ToolCall:
    """A function that the model calls.

    Attributes:
      name: of the function.
      arguments: JSON text, as the model wrote it.
      id: by which the result refers to the call.
    """

    name: str
    arguments: str
    id: str = ""


@dataclasses.dataclass
class Delta:
    """What is new in an answer; only one of the fields is set.

    Attributes:
      content: text for the user.
      reasoning: text that the model wrote for itself.
      tool_call: a complete call.
    """

    content: str = ""
    reasoning: str = ""
    tool_call: ToolCall | None = None


def tool_format(template: str | None) -> Format | None:
    """The format in which a model of this chat template calls tools; None if it does not."""
    template = template or ""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_tag|>" in template or "Environment: ipython" in template:
        return "llama3"
    return None


def reasons(template: str | None) -> bool:
    """Whether models of this chat template write their reasoning between `<think>` tags."""
    return "<think>" in (template or "") or "</think>" in (template or "")


class AnswerParser:
    """Divides an answer.

    Args:
      reasoning: whether the answer may begin with reasoning.
      within: whether the prompt has opened the reasoning already.
      tools: the format of calls; None for an answer that calls no tool.
      names: of the functions that there are; calls of others are text. None for any name.
    """

    def __init__(
        self,
        *,
        reasoning: bool = False,
        within: bool = False,
        tools: Format | None = None,
        names: Sequence[str] | None = None,
    ):
        self._reasoning = _Reasoning(within) if reasoning or within else None
        self._calls = _CALLS[tools](names) if tools else None

    def feed(self, text: str) -> list[Delta]:
        """What a piece of the answer adds."""
        return self._divide(text, last=False)

    def finish(self) -> list[Delta]:
        """What was held back in case that more came."""
        return self._divide("", last=True)

    def _divide(self, text: str, last: bool) -> list[Delta]:
        deltas, content = [], text
        if self._reasoning is not None:
            thought, content = self._reasoning.feed(text, last)
            if thought:
                deltas.append(Delta(reasoning=thought))
        if self._calls is not None:
            deltas += self._calls.feed(content, last)
        elif content:
            deltas.append(Delta(content=content))
        return deltas


def held_back(text: str, marker: str) -> int:
    """How many of the last characters may be the begin of a marker that is not complete."""
    longest = min(len(marker) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)


def shown(text: str, marker: str, last: bool) -> tuple[str, str]:
    """What of a text can be shown before a marker, and what waits: its begin, and white space."""
    if last:
        return text, ""
    end = len(text[: len(text) - held_back(text, marker)].rstrip())
    return text[:end], text[end:]


class _Reasoning:
    """Text up to `</think>`, if the answer begins with `<think>` or the prompt ended with it."""

    _BEGIN, _END = "<think>", "</think>"

    def __init__(self, within: bool):
        self._state = "inside" if within else "before"
        self._rest = ""
        self._at_begin = True  # white space there is the template's

    def feed(self, text: str, last: bool) -> tuple[str, str]:
        """New reasoning, and new text after it."""
        if self._state == "after":
            return "", self._visible(text)
        self._rest += text
        if self._state == "before":
            begun = self._rest.lstrip()
            if self._BEGIN.startswith(begun) and len(begun) < len(self._BEGIN) and not last:
                return "", ""
            if not begun.startswith(self._BEGIN):
                self._state, text, self._at_begin = "after", self._rest, False
                return "", text
            self._state, self._rest = "inside", begun[len(self._BEGIN) :]
        at = self._rest.find(self._END)
        if at >= 0:
            thought, text = self._rest[:at], self._rest[at + len(self._END) :]
            self._state, self._rest = "after", ""
            # The white space before the tag was held back, and goes.
            return self._thought(thought.rstrip()), self._begun(text)
        thought, self._rest = shown(self._rest, self._END, last)
        return self._thought(thought), ""

    def _thought(self, text: str) -> str:
        if self._at_begin:
            text = text.lstrip()
            self._at_begin = not text
        return text

    def _begun(self, text: str) -> str:
        self._at_begin = True
        return self._visible(text)

    def _visible(self, text: str) -> str:
        return self._thought(text)


class _Calls:
    """Text and calls of tools in one of the formats."""

    def __init__(self, names: Sequence[str] | None):
        self._names, self._rest = None if names is None else frozenset(names), ""

    def feed(self, text: str, last: bool) -> list[Delta]:
        """What a piece of text adds; `last` ends what was held back."""
        self._rest += text
        return [each for each in self._take(last) if each != Delta()]

    def _take(self, last: bool) -> Iterator[Delta]:
        raise NotImplementedError

    def _calls(self, value: Any, raw: str) -> list[Delta]:
        """The calls that a JSON value holds; the text as it is, if it holds none."""
        several = value if isinstance(value, list) else [value]
        calls = [self._call(each) for each in several]
        if not several or None in calls:
            return [Delta(content=raw)]
        return [Delta(tool_call=each) for each in calls]

    def _call(self, value: Any) -> ToolCall | None:
        if not isinstance(value, Mapping) or not isinstance(name := value.get("name"), str):
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        text = arguments if isinstance(arguments, str) else _json(arguments)
        return self._named(name, text)

    def _named(self, name: str, arguments: str) -> ToolCall | None:
        if not name or (self._names is not None and name not in self._names):
            return None
        return ToolCall(name, arguments, new_call_id())


class _Hermes(_Calls):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, several of them: Hermes, Qwen."""

    _BEGIN, _END = "<tool_call>", "</tool_call>"
    _after_call = False

    def _take(self, last: bool) -> Iterator[Delta]:
        while True:
            if self._after_call:  # line breaks between calls are not text
                self._rest = self._rest.lstrip()
                if not self._rest:
                    return
            at = self._rest.find(self._BEGIN)
            if at < 0:
                text, self._rest = shown(self._rest, self._BEGIN, last)
                self._after_call = self._after_call and not text
                yield Delta(content=text)
                return
            end = self._rest.find(self._END, at)
            if end < 0 and not last:
                text, self._rest = self._rest[:at], self._rest[at:]
                yield Delta(content=text.rstrip())
                return
            if text := self._rest[:at].rstrip():
                yield Delta(content=text)
            inner = self._rest[at + len(self._BEGIN) : end if end >= 0 else None]
            after = end + len(self._END) if end >= 0 else len(self._rest)
            raw, self._rest = self._rest[at:after], self._rest[after:]
            value = _value(inner)
            yield from self._calls(value, raw)
            self._after_call = True


class _Llama3(_Calls):
    """An answer that is only calls: `{"name": ..., "parameters": {...}}`, divided by semicolons."""

    _TAG = "<|python_tag|>"
    _is_text = False

    def _take(self, last: bool) -> Iterator[Delta]:
        if self._is_text:
            text, self._rest = self._rest, ""
            yield Delta(content=text)
            return
        begun = self._rest.lstrip()
        if not last:
            if not begun or begun[0] == "{" or self._TAG.startswith(begun[: len(self._TAG)]):
                return  # until the end: only then it is clear that all of it is calls
            self._is_text = True
            yield from self._take(last)
            return
        values = _values_in(begun.removeprefix(self._TAG))
        text, self._rest = self._rest, ""
        yield from [Delta(content=text)] if values is None else self._calls(values, text)


class _Mistral(_Calls):
    """`[TOOL_CALLS]` and a list of calls, or `[TOOL_CALLS]name[ARGS]{...}` for each call."""

    _BEGIN = "[TOOL_CALLS]"
    _begun = False

    def _take(self, last: bool) -> Iterator[Delta]:
        if not self._begun:
            at = self._rest.find(self._BEGIN)
            if at < 0:
                text, self._rest = shown(self._rest, self._BEGIN, last)
                yield Delta(content=text)
                return
            text, self._rest, self._begun = self._rest[:at], self._rest[at:], True
            yield Delta(content=text.rstrip())
        if not last:
            return
        text, self._rest = self._rest, ""
        parts = [each.strip() for each in text.split(self._BEGIN)[1:]]
        calls: list[Delta] = []
        for part in parts:
            named = re.fullmatch(
                r"([\w.-]+)\s*(?:\[CALL_ID\](\w+))?\s*(?:\[ARGS\])?\s*(\{.*\})", part, re.DOTALL
            )
            if named and _value(named[3]) is not None:
                call = self._named(named[1], named[3])
                if call is not None and named[2]:
                    call.id = named[2]
                calls.append(Delta(content=part) if call is None else Delta(tool_call=call))
            else:
                calls += self._calls(_value(part), part)
        if any(each.tool_call is None for each in calls):
            calls = [Delta(content=text)]
        yield from calls


class _Json(_Calls):
    """A list of calls and nothing else, which a grammar has forced."""

    def _take(self, last: bool) -> Iterator[Delta]:
        if last:
            text, self._rest = self._rest, ""
            yield from self._calls(_value(text), text)


_CALLS: dict[str, type[_Calls]] = {
    "hermes": _Hermes,
    "llama3": _Llama3,
    "mistral": _Mistral,
    "json": _Json,
}


def _value(text: str) -> Any:
    try:
        return json.loads(text.strip())
    except (ValueError, RecursionError):
        return None


def _values_in(text: str) -> list[Any] | None:
    """The JSON values of a text with semicolons between them; None if it is something else."""
    decoder, values, at = json.JSONDecoder(), [], 0
    text = text.strip()
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return None
        values.append(value)
        at = re.compile(r"[\s;]*").match(text, at).end()  # type: ignore[union-attr]
    return values


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def new_call_id() -> str:
    """An id of a call that no other call has."""
    return f"call_{secrets.token_hex(12)}"
