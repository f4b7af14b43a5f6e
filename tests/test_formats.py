"""One model in every format says the same: safetensors, GGUF, and Orbax."""

import dataclasses

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from spec_jax import LLM, SamplingParams, SpeculativeConfig, checkpoints
from tests.checkpoints.llama_cpp import convert
from tests.checkpoints.test_gguf_families import write_directory
from tests.often import often

PROMPTS = ["the inn in the inn in the", "a thin thing", "in"]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
LOOKUP = SpeculativeConfig(method="prompt_lookup", num_speculative_tokens=3)
FAMILIES = ["gemma3_text", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt2", "falcon"]


def tokens(path, config=None, **options):
    llm = LLM(str(path), speculative_config=config, **options)
    return [out.token_ids for out in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("name", often(FAMILIES, ["gemma3_text"]))
def test_formats_say_the_same(name, tmp_path):
    directory = write_directory(name, tmp_path / "directory")
    file = convert(directory, tmp_path / "model.gguf")
    checkpoints.convert(directory, tmp_path / "orbax")
    checkpoints.convert(tmp_path / "orbax", tmp_path / "back", format="safetensors")
    expected = tokens(directory)
    assert len(set(map(tuple, expected))) == len(PROMPTS)
    assert tokens(file) == tokens(file, LOOKUP) == expected
    assert tokens(tmp_path / "orbax", LOOKUP) == tokens(tmp_path / "back") == expected


@pytest.mark.native
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "phi3"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
@pytest.mark.slow
def test_blocks_of_a_gguf_file_say_what_their_numbers_say(name, kind, tmp_path):
    directory = write_directory(name, tmp_path / "directory")
    file = convert(directory, tmp_path / "model.gguf", GGMLQuantizationType[kind])
    expected = tokens(file, quantization="none")
    for config in (None, LOOKUP):
        found = tokens(file, config, quantization="gguf", activations="float32")
        assert found == expected


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.parametrize("quantization", often(["int8", "int4"], ["int4"]))
def test_rounded_experts_say_what_their_numbers_say(quantization, tmp_path):
    path = str(write_directory("mixtral", tmp_path / "directory"))
    options = {"quantization": quantization, "activations": "float32"}
    llm = LLM(path, **options)
    stack = llm.engine.target.weights["blocks.0.mlp.expert_up.weight"]
    assert stack.format == {"int8": "int8", "int4": "uint4"}[quantization] and stack.is_stack
    found = [out.token_ids for out in llm.generate(PROMPTS, PARAMS)]
    plain = llm.with_speculation(SpeculativeConfig())
    plain.engine.target = plain.engine.target.unpacked()
    assert [out.token_ids for out in plain.generate(PROMPTS, PARAMS)] == found
    # An Orbax directory of the same, rounded when it is loaded, and another when it is written.
    checkpoints.convert(path, tmp_path / "orbax")
    assert tokens(tmp_path / "orbax", **options) == found
    checkpoints.convert(path, tmp_path / quantization, quantization=quantization)
    assert tokens(tmp_path / quantization, activations="float32") == found
    model = dataclasses.replace(checkpoints.load(path).model, attention=None)
    whole = np.asarray(model.weights["blocks.0.mlp.expert_up.weight"])
    step = np.ptp(whole) / (100 if quantization == "int8" else 10)
    assert 0 < np.abs(stack.dequantize() - whole).max() < step
