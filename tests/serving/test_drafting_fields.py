"""Fields that say how a request is drafted: `prediction`, and `speculative` false."""

import openai
import pytest

from spec_jax import SamplingParams
from tests.serving.conftest import NAME, serving

MESSAGES = [{"role": "user", "content": "the thin thing"}]
LOOKUP = {
    "method": "prompt_lookup",
    "num_speculative_tokens": 4,
    "draft_length_policy": "constant",
}


@pytest.fixture(scope="module")
def looking_up(plain):
    with (
        serving(plain.with_speculation(LOOKUP)) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client,
    ):
        yield client


def ask(client, **fields):
    shape = {"temperature": 0, "max_completion_tokens": 40, "extra_body": fields.pop("extra", {})}
    return client.chat.completions.create(model=NAME, messages=MESSAGES, **shape, **fields)


def test_a_predicted_output_is_drafted_from_and_changes_nothing(looking_up, plain):
    (expected,) = plain.chat(MESSAGES, SamplingParams(max_tokens=40))
    text = expected.outputs[0].text
    alone = ask(looking_up)
    assert alone.choices[0].message.content == text
    for content in (text, [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]):
        helped = ask(looking_up, prediction={"type": "content", "content": content})
        assert helped.choices[0].message.content == text
        details = helped.usage.completion_tokens_details
        assert details.accepted_prediction_tokens >= 24  # 40 tokens, at most 4 of 5 are drafted
        assert details.rejected_prediction_tokens <= 16
        statistics = helped.choices[0].speculative_decoding_stats
        assert (
            statistics["num_spec_steps"]
            < alone.choices[0].speculative_decoding_stats["num_spec_steps"]
        )
    wrong = ask(looking_up, prediction={"type": "content", "content": "something else " * 20})
    assert wrong.choices[0].message.content == text
    assert alone.usage.completion_tokens_details.accepted_prediction_tokens is None


def test_a_prediction_beside_other_requests_is_nobody_elses(looking_up, plain):
    (expected,) = plain.chat(MESSAGES, SamplingParams(max_tokens=40, temperature=0.9, seed=3, n=3))
    answer = looking_up.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        temperature=0.9,
        seed=3,
        n=3,
        max_completion_tokens=40,
        prediction={"type": "content", "content": expected.outputs[1].text},
    )
    texts = [each.message.content for each in answer.choices]
    assert texts == [each.text for each in expected.outputs]


@pytest.mark.parametrize("prediction", [{}, {"type": "content"}, {"type": "x", "content": "a"}])
def test_a_prediction_without_a_text_is_refused(looking_up, prediction):
    with pytest.raises(openai.BadRequestError, match="prediction is not understood"):
        ask(looking_up, extra={"prediction": prediction})


def test_a_prediction_longer_than_a_context_is_cut(looking_up):
    alone = ask(looking_up).choices[0].message.content
    prediction = {"type": "content", "content": "the " * 1_000_000}
    assert ask(looking_up, prediction=prediction).choices[0].message.content == alone


def test_a_request_that_wants_no_drafts_gets_none(client, plain):
    drafted = ask(client)
    without = ask(client, extra={"speculative": False})
    assert without.choices[0].message.content == drafted.choices[0].message.content
    assert drafted.choices[0].speculative_decoding_stats["num_draft_tokens"] > 0
    assert without.choices[0].speculative_decoding_stats["num_draft_tokens"] == 0
    assert without.choices[0].speculative_decoding_stats["num_spec_steps"] == 40
