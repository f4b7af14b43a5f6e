"""What users of vLLM write is understood: names, defaults, shapes of prompts."""

import numpy as np
import pytest

from spec_jax import LLM, ConfigError, Layout, RequestError, SamplingParams, SpeculativeConfig
from tests.checkpoints.tiny import write_directory

PARAMS = SamplingParams(max_tokens=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_directory(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def llm(model):
    return LLM(model=model)


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        (
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
            SpeculativeConfig(
                method="prompt_lookup", num_speculative_tokens=3, prompt_lookup_max=4
            ),
        ),
        (
            {"method": "ngram", "model": None, "prompt_lookup_min": 1},
            SpeculativeConfig(method="prompt_lookup"),
        ),
        ({"model": "[ngram]"}, SpeculativeConfig(method="prompt_lookup")),
        (
            {"model": "x", "num_speculative_tokens": 5, "quantization": "int8"},
            SpeculativeConfig(
                method="draft_model", draft="x", num_speculative_tokens=5, draft_quantization="int8"
            ),
        ),
        (
            {"method": "universal_vocabulary", "draft": "x"},
            SpeculativeConfig(method="universal_vocabulary", draft="x"),
        ),
        ({"method": "suffix"}, SpeculativeConfig(method="suffix")),
    ],
)
def test_names_of_a_speculative_config(options, meant):
    assert SpeculativeConfig.from_dict(options) == meant


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "eagle3", "model": "x"}, "method is 'eagle3'"),
        ({"method": "ngram", "prompt_lookup_min": 2}, "prompt_lookup_min is 2; leave it out"),
        ({"model": "x", "draft": "y"}, "model and draft mean the same"),
        ({"num_spec_tokens": 3}, "has no option 'num_spec_tokens'"),
    ],
)
def test_what_a_speculative_config_cannot_mean(options, said, monkeypatch):
    monkeypatch.setattr("spec_jax.checkpoints.load", None)  # nothing is loaded before
    with pytest.raises(ConfigError, match=said):
        LLM("nowhere", speculative_config=options)


def test_a_mapping_configures(model, llm):
    lookup = LLM(model, speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    assert lookup.speculative_config.method == "prompt_lookup"
    found, plain = (each.generate("the inn in the", PARAMS)[0].token_ids for each in (lookup, llm))
    assert found == plain


def test_shapes_of_prompts(llm):
    ids = llm.tokenizer.encode("the inn")
    prompts = ["the inn", {"prompt": "the inn"}, {"prompt_token_ids": ids}, np.array(ids), ids]
    found = llm.generate(prompts, PARAMS)
    assert len({each.token_ids for each in found}) == 1
    assert [each.prompt for each in found] == ["the inn", "the inn", None, None, None]
    assert llm.generate(prompts[1], PARAMS)[0].token_ids == found[0].token_ids
    both = llm.generate({"prompt": "the inn", "prompt_token_ids": ids}, PARAMS)[0]
    assert (both.prompt, both.token_ids) == ("the inn", found[0].token_ids)


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (None, "prompts are None"),
        (5, "prompts are 5"),
        ([None], "prompt 0 is None"),
        (["x", 5.5], "prompt 1 is 5.5"),
        ({"text": "x"}, "prompt 0 is a mapping with 'text'"),
        ({"prompt": "x", "multi_modal_data": {}}, "'prompt', 'multi_modal_data'"),
        ({"prompt": 5, "prompt_token_ids": [1]}, "prompt 0 has the text 5"),
        ({}, "no key"),
        ({"prompt_token_ids": 5}, "prompt 0 is 5"),
        ({"prompt_token_ids": []}, "prompt 0 is empty"),
    ],
)
def test_what_is_no_prompt(llm, prompts, said):
    with pytest.raises(RequestError, match=said):
        llm.generate(prompts, PARAMS)


@pytest.mark.parametrize("params", ["x", ["x"], {"max_tokens": 3}, [None]])
def test_what_are_no_sampling_params(llm, params):
    with pytest.raises(ConfigError, match="sampling_params has"):
        llm.generate(["a"], params)


def test_defaults_of_sampling_params():
    theirs = SamplingParams(
        top_k=-1, stop=None, stop_token_ids=None, bad_words=None, logit_bias=None, seed=None
    )
    assert theirs == SamplingParams()
    with pytest.raises(ConfigError, match="top_k is -2"):
        SamplingParams(top_k=-2)


def test_as_many_tokens_as_the_context_holds(llm):
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    found = llm.generate("the inn", params)[0]
    assert found.finish_reason == "length"
    assert found.usage.total_tokens == llm.max_model_len


def test_a_number_of_devices_is_a_layout(model, llm):
    two = LLM(model, tensor_parallel_size=2)
    assert two.layout == Layout.tensor_parallel(2)
    found = two.generate("the inn in the", PARAMS)[0].token_ids
    assert found == llm.generate("the inn in the", PARAMS)[0].token_ids
    for given in ({"tensor_parallel_size": 0}, {"tensor_parallel_size": 2, "layout": two.layout}):
        with pytest.raises(ConfigError, match="tensor_parallel_size is"):
            LLM(model, **given)
