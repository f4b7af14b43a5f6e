"""Plain decoding and scoring by the same kind of product: equal greedy tokens in bfloat16."""

import ml_dtypes
import pytest

from spec_jax import LLM, SamplingParams, SpeculativeConfig
from spec_jax.decoding import loop
from tests.checkpoints.tiny import CONFIG, llama_tensors, write_directory
from tests.often import often

K = 3
PROMPTS = [
    [token, *(3 + (7 * token * place) % 250 for place in range(6)), token] for token in range(3, 35)
]
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
DRAFTS = {
    "draft_model": {"method": "draft_model"},
    "a draft of varying length": {"method": "draft_model", "draft_length_policy": "heuristic"},
    "prompt_lookup": {"method": "prompt_lookup"},
    "block": {"method": "prompt_lookup", "verification": "block"},
    "suffix": {"method": "suffix"},
    "recycle": {"method": "recycle"},
    "universal_vocabulary": {"method": "universal_vocabulary"},
    "universal_text": {"method": "universal_text"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    shapes = {"target": CONFIG, "draft": CONFIG | {"num_hidden_layers": 1}}
    return {
        name: str(write_directory(folder / name, shape, llama_tensors(shape, ml_dtypes.bfloat16)))
        for name, shape in shapes.items()
    }


@pytest.fixture(scope="module")
def plain(models):
    llm = LLM(
        models["target"],
        dtype="bfloat16",
        speculative_config={"num_speculative_tokens": K, "scoring_consistent": True},
    )
    return llm, [each.token_ids for each in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("name", often(DRAFTS, ["a draft of varying length"]))
def test_tokens_in_bfloat16_are_those_of_plain_decoding_of_the_same_width(models, plain, name):
    llm, texts = plain
    options = {"draft_length_policy": "constant", **DRAFTS[name]}
    options |= {"num_speculative_tokens": K, "scoring_consistent": True}
    if options["method"] in ("draft_model", "universal_vocabulary", "universal_text"):
        options["draft"] = models["draft"]
    fast = llm.with_speculation(options)
    for _ in range(2):  # suffix drafts from the first time
        outputs = fast.generate(PROMPTS, PARAMS)
        assert [each.token_ids for each in outputs] == texts
    assert sum(each.metrics.accepted_tokens for each in outputs) > 0


def test_a_grammar_and_log_probabilities_are_scored_at_the_same_width(plain):
    llm, _ = plain
    fast = llm.with_speculation(
        {"method": "ngram", "num_speculative_tokens": K, "scoring_consistent": True}
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=24, logprobs=2, structured_outputs={"regex": "[a-f ]{30}"}
    )
    ours, theirs = (each.generate(PROMPTS[:8], params) for each in (fast, llm))
    for one, other in zip(ours, theirs, strict=True):
        assert (one.token_ids, one.outputs[0].logprobs) == (
            other.token_ids,
            other.outputs[0].logprobs,
        )


@pytest.mark.parametrize(
    ("options", "widths"),
    [
        ({"method": "none"}, {0}),
        ({"method": "none", "scoring_consistent": True}, {4}),
        ({"method": "prompt_lookup"}, {0, 2, 4, 8}),
        ({"method": "prompt_lookup", "draft_length_policy": "constant"}, {0, 4}),
        ({"method": "prompt_lookup", "scoring_consistent": True}, {8}),
        ({"method": "prompt_lookup", "draft_length_policy": "heuristic"}, {0, 1, 2, 5, 10, 20}),
        (
            {
                "method": "prompt_lookup",
                "draft_length_policy": "heuristic",
                "scoring_consistent": True,
            },
            {20},
        ),
    ],
)
def test_every_call_of_the_target_is_compiled_for_one_width(models, monkeypatch, options, widths):
    """A penalty is computed by XLA, at all places of a width."""
    params = SamplingParams(temperature=0.0, max_tokens=2, repetition_penalty=1.1)
    assert scored_widths(models, monkeypatch, options, params) == widths


@pytest.mark.native
@pytest.mark.parametrize(
    ("options", "params", "widths"),
    [
        ({}, {"temperature": 0.0}, {8}),
        ({}, {"temperature": 0.7}, {8}),
        ({"verification": "token"}, {"temperature": 0.0}, {8}),
        ({"verification": "token"}, {"temperature": 0.7}, {0, 2, 4, 8}),
        ({}, {"temperature": 0.7, "logprobs": 1}, {0, 2, 4, 8}),
    ],
)
def test_drafts_that_are_only_compared_have_one_width(models, monkeypatch, options, params, widths):
    options = {"method": "prompt_lookup"} | options
    params = SamplingParams(max_tokens=2, **params)
    assert scored_widths(models, monkeypatch, options, params) == widths


def scored_widths(models, monkeypatch, options, params):
    scored, score = set(), loop.score

    def noted(target, state, draft, *rest):
        scored.add(draft.lookahead)
        return score(target, state, draft, *rest)

    monkeypatch.setattr(loop, "score", noted)
    llm = LLM(models["target"], speculative_config=SpeculativeConfig(**options))
    llm.generate([PROMPTS[0]], params)
    return scored


@pytest.mark.slow
@pytest.mark.weights
def test_real_weights_in_bfloat16_say_what_plain_decoding_says(demo_recipe):
    def options(method):
        return {"method": method, "num_speculative_tokens": 4, "scoring_consistent": True}

    llm = LLM(
        str(demo_recipe),
        dtype="bfloat16",
        quantization="none",
        speculative_config=options("none"),
        max_model_len=1024,
        max_num_seqs=1,
    )
    prompts = [f"Copy this {n} times: {n} foxes jump over {n + 3} dogs." for n in range(2, 14)]
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    fast = llm.with_speculation(options("prompt_lookup"))
    texts = [[each.token_ids for each in one.generate(prompts, params)] for one in (llm, fast)]
    assert texts[0] == texts[1]
