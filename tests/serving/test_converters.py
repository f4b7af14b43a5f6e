"""Tools, structure and the other two protocols: Responses and Messages are the same chat."""

import json

import httpx2 as httpx
import openai
import pytest

from tests.serving.conftest import NAME

MESSAGES = [{"role": "user", "content": "the thin thing"}]
ADD = {
    "name": "add",
    "description": "Adds.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": ADD}]
FIXED = {"temperature": 0, "seed": 1, "extra_body": {"ignore_eos": True}}


def text_of(client, **fields):
    answer = client.chat.completions.create(
        model=NAME, messages=MESSAGES, max_completion_tokens=12, **FIXED, **fields
    )
    return answer.choices[0].message.content


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
@pytest.mark.parametrize("streams", [False, True])
def test_a_call_that_is_asked_for_is_made(client, choice, streams):
    fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    fields |= {"model": NAME, "messages": MESSAGES, "temperature": 1.0, "seed": 4}
    if not streams:
        (answer,) = client.chat.completions.create(**fields).choices
        (call,), reason = answer.message.tool_calls, answer.finish_reason
        assert answer.message.content is None
    else:
        choices = [
            each.choices[0] for each in client.chat.completions.create(**fields, stream=True)
        ]
        (call,) = [call for each in choices for call in each.delta.tool_calls or ()]
        reason = choices[-1].finish_reason
        assert call.index == 0
    assert call.function.name == "add" and call.id
    assert json.loads(call.function.arguments)["a"] in (1, 2)
    assert reason == "tool_calls"


def test_an_answer_has_the_form_of_a_schema(client):
    schema = {"name": "any", "schema": ADD["parameters"]}
    answer = client.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        temperature=1.0,
        seed=4,
        response_format={"type": "json_schema", "json_schema": schema},
    )
    assert json.loads(answer.choices[0].message.content)["a"] in (1, 2)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS}, "tools"),  # the template of the tiny model has no place for them
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tools"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
        ({"messages": []}, None),
        ({"messages": [1]}, None),
        ({"extra_body": {"continue_final_message": 1}}, "continue_final_message"),
    ],
)
def test_a_mistake_in_a_chat_is_the_clients(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**({"model": NAME, "messages": MESSAGES} | fields))
    assert caught.value.param in (param, "messages")


def test_responses_are_the_same_chat(client):
    expected = text_of(client)
    fields = {"model": NAME, "input": MESSAGES, "max_output_tokens": 12, "temperature": 0}
    fields["extra_body"] = {"ignore_eos": True}
    answer = client.responses.create(**fields)
    assert answer.output_text == expected
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.output_tokens == 12
    assert client.responses.create(**fields | {"input": "the thin thing"}).output_text == expected
    with client.responses.stream(**fields) as stream:
        events = list(stream)
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == expected
    assert [each.sequence_number for each in events] == sorted(e.sequence_number for e in events)
    assert events[-1].response.output_text == expected


def test_messages_are_the_same_chat(client, address):
    expected = text_of(client)
    body = {"model": NAME, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    body["ignore_eos"] = True
    answer = httpx.post(f"{address}/v1/messages", json=body).json()
    assert answer["content"] == [{"type": "text", "text": expected}]
    assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("max_tokens", 12)
    events = []
    with httpx.stream("POST", f"{address}/v1/messages", json=body | {"stream": True}) as lines:
        for line in lines.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line[6:]))
    kinds = [each["type"] for each in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    deltas = (each["delta"]["text"] for each in events if each["type"] == "content_block_delta")
    assert "".join(deltas) == expected
    count = httpx.post(f"{address}/v1/messages/count_tokens", json={"messages": MESSAGES}).json()
    usage = answer["usage"]
    assert count["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert httpx.post(f"{address}/v1/messages", json=body | {"n": 2}).status_code == 400
    wrong = httpx.post(f"{address}/v1/messages", json={"messages": MESSAGES})
    assert wrong.status_code == 400
    assert wrong.json()["type"] == "error" and "max_tokens" in wrong.json()["error"]["message"]
