"""The demo model, real weights: speculation changes nothing that it says."""

from pathlib import Path

import pytest

from spec_jax import LLM, SpeculativeConfig
from spec_jax.config import DRAFTING_METHODS, SamplingParams
from tests.prompts import COPY_PROMPTS, PROMPTS

pytestmark = pytest.mark.weights

DEMO_DRAFT = Path(__file__).parents[1] / "checkpoints" / "smollm2-135m-instruct-draft.toml"

CHOICES = {
    "prompt lookup": {"method": "prompt_lookup", "num_speculative_tokens": 4},
    "demo draft, block": {
        "method": "draft_model",
        "draft": str(DEMO_DRAFT),
        "verification": "block",
    },
    "demo draft, confidence": {
        "method": "draft_model",
        "draft": str(DEMO_DRAFT),
        "draft_length_policy": "confidence",
    },
    "early exit": {"method": "early_exit", "early_exit_layers": 3},
    "suffix": {"method": "suffix"},
    "recycle": {"method": "recycle"},
    "several matches": {"method": "prompt_lookup", "num_drafts": 3},
    "block": {"method": "prompt_lookup", "verification": "block"},
    "token": {"method": "prompt_lookup", "verification": "token"},
    "prefix_batch": {"method": "prompt_lookup", "scoring": "prefix_batch"},
    "heuristic": {
        "method": "early_exit",
        "draft_length_policy": "heuristic",
        "early_exit_layers": 3,
    },
    "confidence": {
        "method": "early_exit",
        "draft_length_policy": "confidence",
        "early_exit_layers": 3,
    },
    "adaptive": {"method": "prompt_lookup", "draft_length_policy": "adaptive"},
    "oracle": {"method": "prompt_lookup", "draft_length_policy": "oracle"},
    "several drafts": {"method": "draft_model", "num_drafts": 2},
    "reduced": {"method": "draft_model", "draft_vocab_size": 8192},
    "universal vocabulary": {"method": "universal_vocabulary"},
    "universal text": {"method": "universal_text"},
}
"""Every method, policy, rule and scoring at least once; models without a draft draft themselves."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("choice", CHOICES)
def test_greedy_text_is_plain_decodings_whatever_is_chosen(demo_recipe, demo_llm, choice):
    llm, prompts, plain = demo_llm
    # An adaptive policy gives up on drafters as bad as an early exit of this model.
    options = {"draft_length_policy": "constant", **CHOICES[choice]}
    if options["method"] in DRAFTING_METHODS:
        options = {"draft": str(demo_recipe), **options}
    fast = llm.with_speculation(SpeculativeConfig(**options))
    for _ in range(2):  # the suffix method drafts from the first time
        outputs = fast.generate(prompts, SamplingParams(max_tokens=16))
        assert [each.token_ids for each in outputs] == plain
    assert sum(each.metrics.accepted_tokens for each in outputs) > 0


def test_the_demo_draft_is_small_and_changes_nothing_that_is_said(demo_llm):
    llm, prompts, plain = demo_llm
    stored = DEMO_DRAFT.with_suffix("")
    assert sum(each.stat().st_size for each in stored.iterdir()) <= 16e6
    config = SpeculativeConfig(
        method="draft_model",
        draft=str(DEMO_DRAFT),
        num_speculative_tokens=2,
        draft_length_policy="constant",
    )
    outputs = llm.with_speculation(config).generate(prompts, SamplingParams(max_tokens=16))
    assert [each.token_ids for each in outputs] == plain
    metrics = [each.metrics for each in outputs]
    kept = sum(each.accepted_per_position[0] for each in metrics)
    # An untrained draft keeps none; this one was measured at 0.24 on chats and tasks to copy.
    assert kept > 0.15 * sum(each.rounds for each in metrics)


@pytest.fixture(scope="module")
def demo_llm(demo_recipe):
    """The demo model, four prompts, and what it says to them."""
    llm = LLM(str(demo_recipe), max_model_len=1024, max_num_seqs=3)
    texts = [*PROMPTS[:3], COPY_PROMPTS[0]]
    chats = [[{"role": "user", "content": text}] for text in texts]
    prompts = [llm.tokenizer.encode_chat(chat) for chat in chats]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=16))
    return llm, prompts, [each.token_ids for each in outputs]


@pytest.mark.slow
def test_blocks_of_a_gguf_file_say_what_their_numbers_in_full_say(demo_recipe):
    """Greedy texts of 20 prompts; the two sums are added up in different orders."""
    params = SamplingParams(max_tokens=64)
    in_full = {"dtype": "float32", "activations": "float32"}
    options = {"max_model_len": 512, "max_num_seqs": 20, **in_full}
    answers = {}
    for quantization in ("gguf", "none"):
        llm = LLM(str(demo_recipe), quantization=quantization, **options)
        prompts = [
            llm.tokenizer.encode_chat([{"role": "user", "content": each}]) for each in PROMPTS[:20]
        ]
        answers[quantization] = [out.token_ids for out in llm.generate(prompts, params)]
    assert answers["gguf"] == answers["none"]
