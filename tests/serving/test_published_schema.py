"""Requests drawn from the types of OpenAI's published specification: no answer is a failure.

The official client's types are made from the specification. Its models read every answer strictly.
"""

import itertools
import json
from collections.abc import Iterable

import httpx2 as httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from openai.types import Completion, completion_create_params
from openai.types.chat import ChatCompletion
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import Response, response_create_params

ENDPOINTS = {
    "/v1/completions": (
        completion_create_params.CompletionCreateParamsNonStreaming,
        Completion,
    ),
    "/v1/chat/completions": (
        chat_create_params.CompletionCreateParamsNonStreaming,
        ChatCompletion,
    ),
    "/v1/responses": (response_create_params.ResponseCreateParamsNonStreaming, Response),
}
SMALL = {"/v1/responses": "max_output_tokens"}
"""What bounds an answer, where it is not `max_tokens`."""


def as_json(value):
    """A drawn value with lists for iterables, if JSON can hold it."""
    if isinstance(value, dict):
        return {str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    if isinstance(value, Iterable):  # an `object` may be one without end
        return [as_json(each) for each in itertools.islice(value, 20)]
    return str(value)


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    "count", [60, pytest.param(1700, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_no_request_of_the_specification_fails(address, path, count):
    params, answer_type = ENDPOINTS[path]
    seen = {"answered": 0, "refused": 0}

    # The types of the specification are large; hypothesis warns of their names.
    @settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=[*HealthCheck],
        phases=[Phase.generate],
        database=None,
    )
    @given(st.from_type(params), st.booleans())
    def ask(client, drawn, is_plain):
        body = as_json(drawn)
        if body.get(SMALL.get(path, "max_tokens")) not in range(1, 4):
            body[SMALL.get(path, "max_tokens")] = 2
        body["n"] = 1 if path != "/v1/responses" else None
        body.pop("model", None)
        if is_plain:  # most other fields are unknown here
            names = ("prompt", "messages", "input", "temperature", "top_p", "seed", "stop", "n")
            names += ("max_tokens", "max_output_tokens", "logprobs", "user", "metadata", "store")
            body = {name: value for name, value in body.items() if name in names}
        try:
            data = json.dumps(body, allow_nan=False).encode()
        except (ValueError, UnicodeEncodeError):
            return
        response = client.post(path, content=data)
        if response.status_code == 200:
            seen["answered"] += 1
            answer_type.model_validate(response.json(), strict=False)
        else:
            seen["refused"] += 1
            assert 400 <= response.status_code < 500, (body, response.text)
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"} and error["message"]

    with httpx.Client(base_url=address, timeout=120) as client:
        ask(client)
    assert seen["answered"] and seen["refused"], seen
