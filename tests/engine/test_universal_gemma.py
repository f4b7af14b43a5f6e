"""Gemma 3 270M and SmolLM2-135M-Instruct draft for each other, real weights, float32."""

import pytest

from spec_jax import LLM, SamplingParams, SpeculativeConfig
from tests.conftest import ROOT
from tests.prompts import PROMPTS

pytestmark = [pytest.mark.gemma, pytest.mark.slow, pytest.mark.timeout(3600)]

GEMMA = str(ROOT / "checkpoints" / "gemma3-270m.toml")
SMOLLM2 = str(ROOT / "checkpoints" / "smollm2-135m-instruct.toml")
QUESTIONS = PROMPTS[::3]
GREEDY = SamplingParams(max_tokens=32)


@pytest.fixture(scope="module", params=[(GEMMA, SMOLLM2), (SMOLLM2, GEMMA)], ids=["gemma", "smol"])
def pair(request):
    """The target, its prompts, what it says, and the draft's reference."""
    target, draft = request.param
    llm = LLM(target, max_num_seqs=4, max_model_len=512)
    prompts = [llm.tokenizer.encode(question) for question in QUESTIONS]
    if llm.tokenizer.chat_template is not None:
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        prompts = [llm.tokenizer.encode_chat(chat) for chat in chats]
    return llm, prompts, [each.token_ids for each in llm.generate(prompts, GREEDY)], draft


@pytest.mark.parametrize("method", ["universal_vocabulary", "universal_text"])
def test_greedy_text_is_plain_decodings(pair, method):
    llm, prompts, expected, draft = pair
    drafted = llm.with_speculation(SpeculativeConfig(method=method, draft=draft))
    outputs = drafted.generate(prompts, GREEDY)
    assert [each.token_ids for each in outputs] == expected and len(expected) == 20
    accepted = sum(each.metrics.accepted_tokens for each in outputs)
    assert accepted > 0.1 * sum(each.metrics.draft_tokens for each in outputs)
