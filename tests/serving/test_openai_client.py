"""The official client, unchanged, gets from the server the texts that `LLM` decodes."""

import openai
import pytest

from spec_jax import SamplingParams
from tests.serving.conftest import NAME

PROMPTS = ["the thin thing in the", "a", "and then the end of the the the"]
MESSAGES = [{"role": "user", "content": "the thin thing"}]


def test_models_have_their_length_under_every_name(client, plain):
    (model,) = client.models.list().data
    assert model.id == NAME
    assert model.max_model_len == model.context_length == model.meta["n_ctx"]
    assert model.max_model_len == plain.max_model_len
    assert client.models.retrieve(NAME).id == NAME


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_completions_are_the_texts_that_generate_gives(client, plain, temperature):
    params = SamplingParams(max_tokens=20, temperature=temperature, seed=5, logprobs=2)
    expected = plain.generate(PROMPTS, params)
    shape = {"max_tokens": 20, "temperature": temperature, "seed": 5, "logprobs": 2}
    extra = {"extra_body": {"return_token_ids": True}}
    answer = client.completions.create(model=NAME, prompt=PROMPTS, **shape, **extra)
    assert [each.index for each in answer.choices] == [0, 1, 2]
    for choice, output in zip(answer.choices, expected, strict=True):
        assert choice.token_ids == list(output.token_ids)
        assert (choice.text, choice.finish_reason) == (output.text, output.finish_reason)
        logprobs = [
            each[token].logprob
            for token, each in zip(output.token_ids, output.outputs[0].logprobs, strict=True)
        ]
        assert choice.logprobs.token_logprobs == pytest.approx(logprobs, abs=1e-4)
    assert answer.usage.completion_tokens == sum(len(each.token_ids) for each in expected)
    assert answer.usage.prompt_tokens == sum(len(each.prompt_token_ids) for each in expected)
    texts, ids, reasons, values = ["", "", ""], [[], [], []], [None] * 3, [[], [], []]
    events = client.completions.create(
        model=NAME,
        prompt=PROMPTS,
        stream=True,
        stream_options={"include_usage": True},
        **shape,
        **extra,
    )
    usage = None
    for event in events:
        for choice in event.choices:
            texts[choice.index] += choice.text
            ids[choice.index] += choice.token_ids
            reasons[choice.index] = choice.finish_reason
            values[choice.index] += choice.logprobs.token_logprobs if choice.logprobs else []
        if event.usage is not None:
            assert usage is None and not event.choices
            usage = event.usage
    assert texts == [each.text for each in answer.choices]
    assert ids == [each.token_ids for each in answer.choices]
    assert reasons == [each.finish_reason for each in answer.choices]
    for i in range(3):
        assert values[i] == pytest.approx(answer.choices[i].logprobs.token_logprobs, abs=1e-4)
    assert usage.completion_tokens == answer.usage.completion_tokens


def test_a_chat_is_the_text_that_chat_gives(client, plain):
    params = SamplingParams(max_tokens=20, temperature=0.7, seed=3, n=2, logprobs=3)
    (expected,) = plain.chat(MESSAGES, params)
    shape = {"max_completion_tokens": 20, "temperature": 0.7, "seed": 3, "n": 2}
    shape |= {"logprobs": True, "top_logprobs": 3}
    answer = client.chat.completions.create(model=NAME, messages=MESSAGES, **shape)
    assert [each.message.content for each in answer.choices] == [
        each.text for each in expected.outputs
    ]
    for choice, output in zip(answer.choices, expected.outputs, strict=True):
        for entry, token, place in zip(
            choice.logprobs.content, output.token_ids, output.logprobs, strict=True
        ):
            assert entry.logprob == pytest.approx(place[token].logprob, abs=1e-4)
            assert len(entry.top_logprobs) == 3
            assert bytes(entry.bytes) == (
                plain.tokenizer.token_bytes(token) or entry.token.encode()
            )
    contents, roles, reasons, entries = ["", ""], ["", ""], [None, None], [[], []]
    for event in client.chat.completions.create(
        model=NAME, messages=MESSAGES, stream=True, **shape
    ):
        assert event.usage is None
        for choice in event.choices:
            assert reasons[choice.index] is None
            if not contents[choice.index] and choice.delta.role:
                roles[choice.index] = choice.delta.role
            contents[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason
            entries[choice.index] += choice.logprobs.content if choice.logprobs else []
    assert roles == ["assistant", "assistant"]
    assert contents == [each.message.content for each in answer.choices]
    assert reasons == [each.finish_reason for each in answer.choices]
    assert [len(each) for each in entries] == [len(each.token_ids) for each in expected.outputs]


def test_stop_strings_are_not_in_the_text(client, plain):
    text = plain.generate(PROMPTS[0], SamplingParams(max_tokens=32, ignore_eos=True))[0].text
    stop = text[4:7]
    shape = {
        "model": NAME,
        "prompt": PROMPTS[0],
        "max_tokens": 32,
        "temperature": 0,
        "stop": [stop],
    }
    shape["extra_body"] = {"ignore_eos": True}
    (choice,) = client.completions.create(**shape).choices
    assert choice.text == text[: text.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    streamed = "".join(
        each.choices[0].text for each in client.completions.create(**shape, stream=True)
    )
    assert streamed == choice.text


def test_echo_gives_the_prompt_and_its_log_probabilities(client, plain):
    params = SamplingParams(max_tokens=1, logprobs=1, prompt_logprobs=1)
    (expected,) = plain.generate(PROMPTS[0], params)
    shape = {"model": NAME, "prompt": PROMPTS[0], "echo": True, "temperature": 0, "logprobs": 1}
    (choice,) = client.completions.create(**shape, max_tokens=0).choices
    assert choice.text == PROMPTS[0]
    places = zip(expected.prompt_token_ids[1:], expected.prompt_logprobs[1:], strict=True)
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(
        [place[token].logprob for token, place in places], abs=1e-4
    )
    assert "".join(choice.logprobs.tokens) == PROMPTS[0]
    at = [PROMPTS[0][:end] for end in choice.logprobs.text_offset]
    assert at == ["".join(choice.logprobs.tokens[:i]) for i in range(len(at))]


@pytest.mark.parametrize("max_tokens", [0, 6])
@pytest.mark.parametrize("prompts", [PROMPTS[0], PROMPTS[:2], [[5, 6, 7]]])
def test_a_stream_echoes_what_an_answer_does(client, prompts, max_tokens):
    shape = {"model": NAME, "prompt": prompts, "max_tokens": max_tokens, "temperature": 0}
    shape |= {"echo": True, "logprobs": 2, "extra_body": {"return_token_ids": True}}
    answer = client.completions.create(**shape)
    streamed = [{} for _ in answer.choices]
    for event in client.completions.create(**shape, stream=True):
        for choice in event.choices:
            parts = {"text": choice.text, "token_ids": choice.token_ids}
            if hasattr(choice, "prompt_token_ids"):
                parts["prompt_token_ids"] = choice.prompt_token_ids
            parts |= choice.logprobs.to_dict() if choice.logprobs else {}
            for name, part in parts.items():
                joined = streamed[choice.index]
                joined[name] = joined[name] + part if name in joined else part
    for choice, joined in zip(answer.choices, streamed, strict=True):
        whole = {"text": choice.text, "token_ids": choice.token_ids}
        whole |= {"prompt_token_ids": choice.prompt_token_ids} | choice.logprobs.to_dict()
        assert joined.keys() == whole.keys()
        assert len(choice.logprobs.tokens) == len(choice.prompt_token_ids) + max_tokens
        for name in ("text", "token_ids", "prompt_token_ids", "tokens", "text_offset"):
            assert joined[name] == whole[name]
        assert joined["token_logprobs"][0] is whole["token_logprobs"][0] is None
        assert joined["token_logprobs"][1:] == pytest.approx(whole["token_logprobs"][1:], abs=1e-4)
        assert [each and set(each) for each in joined["top_logprobs"]] == [
            each and set(each) for each in whole["top_logprobs"]
        ]


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"model": "other"}, 404, "model", "model_not_found"),
        ({"temperature": -1}, 400, "temperature", None),
        ({"top_p": "much"}, 400, "top_p", None),
        ({"n": 1000}, 400, "n", None),
        ({"max_tokens": 0}, 400, "max_tokens", None),
        ({"prompt": []}, 400, "prompt", None),
        ({"prompt": "the " * 5000}, 400, "prompt", "context_length_exceeded"),
        ({"prompt": [1, 2, 10**9]}, 400, "prompt", None),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias", None),
        ({"logprobs": 100}, 400, "logprobs", None),
        ({"extra_body": {"tempreature": 1}}, 400, "tempreature", "unknown_parameter"),
        ({"extra_body": {"guided_json": {}}}, 400, "guided_json", "unknown_parameter"),
        ({"extra_body": {"response_format": {"type": "xml"}}}, 400, "response_format", None),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options", None),
    ],
)
def test_a_mistake_is_an_error_of_the_client(client, fields, status, param, code):
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(**({"model": NAME, "prompt": "a", "max_tokens": 2} | fields))
    assert (caught.value.status_code, caught.value.param, caught.value.code) == (
        status,
        param,
        code,
    )
    assert caught.value.body["message"].endswith((".", "?")) and caught.value.type
