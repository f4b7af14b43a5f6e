"""Bodies that nobody meant: each is an answer or the client's mistake, never the server's."""

import random

import httpx2 as httpx
import pytest

from tests.serving.conftest import NAME

VALUES = [
    *(None, True, False, 0, 1, -1, 2, 3.5, -0.0, 1e308, -1e308, 2**31, 2**63, -(2**70), 10**400),
    *("", "a", "\x00", "\ud800", "the " * 2000, "ÿ\u202e", "null", "NaN"),
    *([], [[]], [None], [""], ["a", 1], [1, "a"], [0], [-1], [2**40], [[1], [2]], [{}], [[[]]]),
    *({}, {"": None}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {}}),
    *({"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}},),
    *({"type": "json_schema", "json_schema": {"schema": {"$ref": "#/$defs/a"}}},),
    *({"a": {"b": {"c": []}}}, {"1": 1}, {"-1": 1}, {"0": "x"}, {"0": 1e39}, {"regex": "("}),
    *({"regex": "(a|b)*" * 50}, {"grammar": "start: start"}, {"json": {"type": "string"}}),
    {"include_usage": True},
    [{"role": "user", "content": "a"}],
    [{"role": "tool", "content": "a"}],
    [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}],
    [{"role": "user", "content": [{"type": "text", "text": 1}]}],
    [{"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}],
    [{"type": "function", "function": {"name": "a", "parameters": 3}}],
    [{"type": "function", "name": "a", "parameters": {}}],
    [{"name": "a", "input_schema": {}}],
    [{"type": "function_call", "call_id": "a"}, {"type": "function_call_output"}],
    [{"type": "reasoning", "content": [1]}],
    {"type": "function", "function": {"name": "a"}},
    {"format": {"type": "json_schema", "schema": {}}},
]
MESSAGES = [{"role": "user", "content": "the"}]
BODIES = {
    "/v1/completions": {"prompt": "the", "max_tokens": 3},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/responses": {"input": MESSAGES, "max_output_tokens": 3},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"prompt": "the"},
    "/detokenize": {"tokens": [1, 2]},
}
SAMPLING = [
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "bad_words", "min_tokens"),
    *("stop_token_ids", "allowed_token_ids", "ignore_eos", "structured_outputs", "detokenize"),
    *("truncate_prompt_tokens", "prompt_logprobs", "namespace", "skip_special_tokens", "user"),
    *("include_stop_str_in_output", "model", "stream", "metadata", "unknown"),
]
CHAT = [
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"),
    *("max_completion_tokens", "response_format", "stream_options", "logprobs", "top_logprobs"),
    *("continue_final_message", "add_generation_prompt", "reasoning_effort", "store"),
    *("return_token_ids", "return_token_sources", "prediction", "speculative"),
]
FIELDS = {
    "/v1/completions": [
        *("prompt", "echo", "suffix", "best_of", "logprobs", "stream_options", "response_format"),
        *("return_token_ids", *SAMPLING),
    ],
    "/v1/chat/completions": [*CHAT, *SAMPLING],
    "/v1/responses": [
        *("input", "instructions", "reasoning", "text", "previous_response_id", "conversation"),
        *("background", "include", "max_output_tokens", "tools", "tool_choice", *SAMPLING),
    ],
    "/v1/messages": [
        *("messages", "system", "thinking", "stop_sequences", "tools", "tool_choice", *SAMPLING),
    ],
    "/v1/messages/count_tokens": ["messages", "system", "thinking", "tools", "tool_choice"],
    "/tokenize": [
        *("prompt", "messages", "add_special_tokens", "return_token_strs", "tools"),
        *("add_generation_prompt", "chat_template_kwargs"),
    ],
    "/detokenize": ["tokens", "model"],
}


def send_hostile(client, seed, count):
    """Sends mutated bodies; returns how many were answered with which status."""
    rng, statuses = random.Random(seed), {}
    for _ in range(count):
        path = rng.choice(list(BODIES))
        body = {"model": NAME, **BODIES[path]}
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            body[rng.choice(FIELDS[path])] = rng.choice(VALUES)
        if "stream" in FIELDS[path]:
            body.setdefault("stream", rng.random() < 0.2)
        try:
            response = client.post(path, json=body)
        except (UnicodeEncodeError, ValueError):
            continue  # no JSON
        status = response.status_code
        statuses[status] = statuses.get(status, 0) + 1
        assert status < 500, (path, body, response.text)
        if status >= 400:
            error = response.json()["error"]
            assert error["message"] and error["type"] != "server_error", (path, body)
        assert "server_error" not in response.text, (path, body, response.text)
        assert "Traceback" not in response.text
    return statuses


@pytest.mark.parametrize(
    ("seed", "count"), [(1, 400), pytest.param(3, 5000, marks=pytest.mark.slow)]
)
def test_no_body_is_the_servers_mistake(address, seed, count):
    with httpx.Client(base_url=address, timeout=60) as client:
        statuses = send_hostile(client, seed, count)
        assert client.get("/health").status_code == 200
    assert statuses[200] > count / 25 and statuses[400] > count / 4
