"""The fields of a request's body: checked, and turned into `SamplingParams`."""

import dataclasses
import difflib
import json
from collections.abc import Mapping
from typing import Any

from spec_jax.config import MAX_LOGPROBS, SamplingParams
from spec_jax.serving.errors import wrong

SAMPLING = frozenset(each.name for each in dataclasses.fields(SamplingParams))
"""Fields that are passed on; `SamplingParams` checks their values."""

WITHOUT_EFFECT = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "verbosity"),
        *("priority", "request_id", "cache_prompt", "cache_salt", "moderation"),
    }
)
"""Fields of other servers that change no answer of this one."""

_REFUSED = {
    "best_of": "use n, and choose by the log-probabilities",
    "suffix": "leave it out: text is not inserted",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "modalities": "leave it out: answers are text",
    "audio": "leave it out: answers are text",
    "web_search_options": "leave it out: nothing is searched",
    "use_beam_search": "leave it out: beams are not searched",
    "guided_json": "use response_format, or structured_outputs",
    "guided_regex": "use structured_outputs",
    "guided_choice": "use structured_outputs",
    "guided_grammar": "use structured_outputs",
    "grammar": "use structured_outputs",
    "json_schema": "use response_format, or structured_outputs",
    "n_predict": "use max_tokens",
    "max_new_tokens": "use max_tokens",
    "documents": "put them into the messages",
    "logits_processors": "use logit_bias, bad_words or structured_outputs",
}
"""What to do instead of fields that other servers know."""

MAX_COMPLETIONS = 128
"""Of a prompt, as in the OpenAI API."""


class Fields:
    """A body's fields, taken one by one; those that nothing takes are refused.

    A field that is null counts as left out, as in the OpenAI API.

    Args:
      body: the JSON object.
    """

    def __init__(self, body: Mapping[str, Any]):
        self.names = frozenset(body)
        self._left = {name: value for name, value in body.items() if value is not None}
        self._asked: set[str] = set()

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """A field's value, if it is of the kind."""
        self._asked.add(name)
        if name not in self._left:
            return default
        value = self._left.pop(name)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            words = " or ".join(_WORDS[each] for each in kinds)
            raise wrong(name, f"{name} is {_shown(value)}; give {words}.")
        return value

    def include_usage(self, streams: bool) -> bool:
        """Whether a stream ends with the usage."""
        options = self.take("stream_options", dict, {})
        if options and not streams:
            raise wrong("stream_options", "stream_options needs stream true; leave it out.")
        return options.get("include_usage") is True

    def passed_on(self) -> dict[str, Any]:
        """The parameters of sampling, for an endpoint that is turned into a chat."""
        if self._left.pop("n", 1) != 1:
            raise wrong("n", "n is not 1; this endpoint gives one answer.")
        return self._sampling()

    def _sampling(self) -> dict[str, Any]:
        self._asked |= SAMPLING
        return {name: self._left.pop(name) for name in SAMPLING & self._left.keys()}

    def needed(self, name: str, kind: type | tuple[type, ...]) -> Any:
        """Like `take`, for a field that there must be."""
        value = self.take(name, kind)
        if value is None:
            raise wrong(name, f"{name} is missing; give it.", "missing_required_parameter")
        return value

    def sampling(self, defaults: Mapping[str, Any], **changed: Any) -> SamplingParams:
        """The parameters of the request; `defaults` of fields that it leaves out.

        Raises:
          ApiError, ConfigError: a value is wrong.
        """
        values = self._sampling()
        if "structured_outputs" in changed and "structured_outputs" in values:
            raise wrong(
                "structured_outputs",
                "structured_outputs is given beside response_format or tool_choice; leave one out.",
            )
        if "logit_bias" in values:
            values["logit_bias"] = _logit_bias(values["logit_bias"])
        if isinstance(seed := values.get("seed"), int) and not isinstance(seed, bool):
            values["seed"] = seed % 2**64  # OpenAI's are signed
        count = values.get("n", 1)
        if isinstance(count, int) and count > MAX_COMPLETIONS:
            raise wrong("n", f"n is {count}; at most {MAX_COMPLETIONS} completions are made.")
        return SamplingParams(**{**defaults, **values, **changed})

    def end(self) -> None:
        """Refuses the fields that nothing has taken."""
        for name in sorted(self._left.keys() - WITHOUT_EFFECT):
            close = difflib.get_close_matches(name, self._asked, n=1, cutoff=0.7)
            hint = f"did you mean {close[0]!r}?" if close else "leave it out."
            remedy = f"{_REFUSED[name]}." if name in _REFUSED else hint
            message = f"{name} is not a field of this request; {remedy}"
            raise wrong(name, message, "unknown_parameter")


def structure(format: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What `response_format` makes of the output, as `structured_outputs`."""
    if format is None:
        return None
    kind = format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        outer = format.get("json_schema")
        # The Responses API has no object around the schema.
        outer = outer if isinstance(outer, Mapping) else format
        schema = outer.get("schema")
        if not isinstance(schema, Mapping):
            raise wrong(
                "response_format",
                "response_format has no JSON schema; give {'type': 'json_schema', 'json_schema': "
                "{'name': ..., 'schema': {...}}}.",
            )
        return {"json": dict(schema)}
    raise wrong(
        "response_format",
        f"response_format has the type {_shown(kind)}; give 'text', 'json_object' or "
        "'json_schema'.",
    )


def checked_logprobs(name: str, count: int | None) -> int | None:
    """A number of log-probabilities that may be asked for."""
    if count is not None and not 0 <= count <= MAX_LOGPROBS:
        raise wrong(name, f"{name} is {count}; give a number from 0 to {MAX_LOGPROBS}.")
    return count


def _logit_bias(value: Any) -> dict[Any, Any]:
    """The biases by token; JSON's keys are texts."""
    if not isinstance(value, Mapping):
        raise wrong("logit_bias", f"logit_bias is {_shown(value)}; give {{token id: bias}}.")
    biases: dict[int, Any] = {}
    for token, bias in value.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise wrong("logit_bias", f"logit_bias has the token {_shown(token)}; give token ids.")
        biases[int(token)] = bias
    return biases


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)[:100]


_WORDS: dict[type, str] = {
    str: "a text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}
