"""The four forms of a reference give the same model."""

import json
import subprocess
import sys

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from spec_jax import checkpoints
from spec_jax.models.rotary import RopeScaling
from tests.checkpoints.tiny import (
    CONFIG,
    TOKENS,
    llama_tensors,
    write_directory,
    write_gguf,
    write_json,
)

TIED = dict(CONFIG, tie_word_embeddings=True)


def assert_same_weights(one, other, **tolerance):
    leaves, others = (jax.tree.leaves_with_path(model.params) for model in (one, other))
    assert [path for path, _ in leaves] == [path for path, _ in others]
    for (_, leaf), (_, expected) in zip(leaves, others, strict=True):
        assert leaf.dtype == expected.dtype
        np.testing.assert_allclose(leaf, expected, **tolerance or {"rtol": 0})


def test_directory(tmp_path):
    checkpoint = checkpoints.load(write_directory(tmp_path / "tiny"))
    tensors = llama_tensors(CONFIG)
    params = checkpoint.model.params
    assert checkpoint.name == "tiny"
    assert checkpoint.model.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    np.testing.assert_array_equal(
        params["embed"]["weight"][...], tensors["model.embed_tokens.weight"].T
    )
    np.testing.assert_array_equal(
        params["blocks"][1]["mlp"]["down"]["weight"][...],
        tensors["model.layers.1.mlp.down_proj.weight"].T,
    )
    assert checkpoint.model.config.head_dim == 6
    assert checkpoint.tokenizer.decode(checkpoint.tokenizer.encode("the inn")) == "the inn"


def test_params_are_those_of_a_model_made_otherwise(tmp_path):
    model = checkpoints.load(write_directory(tmp_path)).model
    random = type(model).random(model.config)
    assert jax.tree.structure(model.params) == jax.tree.structure(random.params)
    assert model.graphdef == random.graphdef


def test_loading_makes_no_random_weights(tmp_path, monkeypatch):
    write_directory(tmp_path)
    real = jax.random.normal

    def only_traced(key, *args, **kwargs):
        assert isinstance(key, jax.core.Tracer)
        return real(key, *args, **kwargs)

    monkeypatch.setattr(jax.random, "normal", only_traced)
    checkpoints.load(tmp_path)


def test_shards(tmp_path):
    whole = checkpoints.load(write_directory(tmp_path / "whole"))
    shards = checkpoints.load(write_directory(tmp_path / "shards", shards=3))
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) == 3
    assert_same_weights(shards.model, whole.model)


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_stored_dtypes_are_widened_exactly(tmp_path, stored):
    tensors = llama_tensors(CONFIG, stored)
    model = checkpoints.load(write_directory(tmp_path, tensors=tensors)).model
    np.testing.assert_array_equal(
        model.params["head"]["weight"][...], tensors["lm_head.weight"].astype(np.float32).T
    )


def test_dtype(tmp_path):
    model = checkpoints.load(write_directory(tmp_path), dtype="bfloat16").model
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype("bfloat16")}
    np.testing.assert_array_equal(
        model.params["head"]["weight"][...],
        llama_tensors(CONFIG)["lm_head.weight"].astype(ml_dtypes.bfloat16).T,
    )


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["own head", "tied head"])
def test_gguf_is_the_directory(tmp_path, config):
    directory = checkpoints.load(write_directory(tmp_path / "tiny", config))
    file = checkpoints.load(write_gguf(tmp_path / "tiny.gguf", config))
    assert file.name == "tiny"
    assert file.model.config == directory.model.config
    assert_same_weights(file.model, directory.model)
    assert file.tokenizer.vocabulary_difference(directory.tokenizer) is None
    assert file.tokenizer.vocab_size == len(TOKENS) < file.model.config.vocab_size


GEMMAS = {
    # model_type -> its own configuration, GGUF's architecture and metadata, norms beside Llama's
    "gemma": ({}, "gemma", {}, ()),
    "gemma2": (
        {"query_pre_attn_scalar": 6, "sliding_window": 8, "attn_logit_softcapping": 20.0},
        "gemma2",
        {"gemma2.attention.sliding_window": 8, "gemma2.attn_logit_softcapping": 20.0},
        ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    "gemma3_text": (
        {"query_pre_attn_scalar": 6, "sliding_window": 8},
        "gemma3",
        {"gemma3.attention.sliding_window": 8},
        (
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
            "self_attn.q_norm",
            "self_attn.k_norm",
        ),
    ),
}


@pytest.mark.parametrize("model_type", GEMMAS)
def test_gguf_of_gemma_is_the_directory(tmp_path, model_type):
    """A directory stores how much more than one its norms' weights are, whatever its dtype."""
    own, architecture, extra, norms = GEMMAS[model_type]
    config = TIED | own | {"model_type": model_type}
    random = np.random.default_rng(1)
    tensors = llama_tensors(config, ml_dtypes.bfloat16)
    for i in range(config["num_hidden_layers"]):
        for name in norms:
            size = 6 if name.startswith("self_attn") else 16
            weight = random.normal(0, 0.3, size).astype(ml_dtypes.bfloat16)
            tensors[f"model.layers.{i}.{name}.weight"] = weight
    directory = checkpoints.load(write_directory(tmp_path / "tiny", config, tensors)).model
    wide = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    file = checkpoints.load(
        write_gguf(tmp_path / "tiny.gguf", config, wide, extra=extra, architecture=architecture)
    ).model
    assert file.config == directory.config
    assert_same_weights(file, directory)
    np.testing.assert_array_equal(
        file.params["final_norm"]["weight"][...], wide["model.norm.weight"] + 1
    )


@pytest.mark.parametrize("quantization", ["Q8_0", "Q4_1", "BF16", "F16"])
def test_quantized_gguf(tmp_path, quantization):
    config = dict(CONFIG, hidden_size=32, intermediate_size=32, head_dim=8)
    exact = checkpoints.load(write_gguf(tmp_path / "exact.gguf", config)).model
    kind = gguf.GGMLQuantizationType[quantization]
    model = checkpoints.load(write_gguf(tmp_path / "q.gguf", config, quantization=kind)).model
    assert_same_weights(model, exact, atol=0.2 if quantization == "Q4_1" else 0.02)


def test_gguf_with_llama3_positions(tmp_path):
    """llama.cpp stores what each frequency is divided by, instead of the four numbers."""
    config = dict(CONFIG, head_dim=64, rope_parameters={"rope_theta": 500000.0})
    factor, low, high, original = 32.0, 1.0, 4.0, 8192
    divisors = []
    for i in range(32):
        wavelength = 2 * np.pi * 500000.0 ** (2 * i / 64)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    tensors = llama_tensors(config) | {"rope_freqs.weight": np.array(divisors, np.float32)}
    model = checkpoints.load(write_gguf(tmp_path / "tiny.gguf", config, tensors)).model
    assert model.config.rotated.scaling == RopeScaling(factor, low, high, original)


def test_tied_head_may_be_stored_all_the_same(tmp_path):
    tensors = llama_tensors(CONFIG)
    model = checkpoints.load(write_directory(tmp_path, TIED, tensors)).model
    assert model.config.tied_head


def test_buffers_are_skipped(tmp_path):
    tensors = llama_tensors(CONFIG)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
    checkpoints.load(write_directory(tmp_path, tensors=tensors))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [0, 2]}, 0, (0, 2)),
        ({"eos_token_id": 1}, 0, (1,)),
        ({"temperature": 0.5}, 0, (0, 2)),
        (None, [0, 1], (0, 1, 2)),
        (None, None, (2,)),
    ],
)
def test_end_of_sequence_tokens(tmp_path, generation, config, expected):
    write_directory(tmp_path, dict(CONFIG, eos_token_id=config))
    if generation is not None:
        write_json(tmp_path / "generation_config.json", generation)
    assert checkpoints.load(tmp_path).eos_token_ids == expected


def test_recipe_with_a_path(tmp_path):
    (tmp_path / "weights").mkdir()
    write_gguf(tmp_path / "weights" / "tiny.gguf")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('name = "a-name"\nlicense = "MIT"\n[source]\npath = "weights/tiny.gguf"\n')
    lines = []
    checkpoint = checkpoints.load(recipe, on_progress=lines.append)
    assert checkpoint.name == "a-name"
    assert lines == ["loading a-name"]


def test_a_relative_path_and_text(tmp_path, monkeypatch):
    write_directory(tmp_path / "models" / "tiny")
    monkeypatch.chdir(tmp_path)
    assert checkpoints.load("models/tiny").name == "tiny"


def test_no_torch(tmp_path):
    """Reading GGUF, tokenizing and chat templates need no torch, even where it is installed."""
    write_gguf(tmp_path / "tiny.gguf")
    program = f"""
import sys
from spec_jax import checkpoints
checkpoint = checkpoints.load({str(tmp_path / "tiny.gguf")!r})
ids = checkpoint.tokenizer.encode_chat([{{"role": "user", "content": "hi"}}])
checkpoint.tokenizer.decode(ids)
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.weights
def test_demo_model(demo_recipe):
    checkpoint = checkpoints.load(demo_recipe)
    tokenizer, model = checkpoint.tokenizer, checkpoint.model
    assert checkpoint.name == "smollm2-135m-instruct"
    assert [tokenizer.token(i) for i in checkpoint.eos_token_ids] == ["<|endoftext|>", "<|im_end|>"]
    ids = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    answer = []
    cache = model.new_cache(1, len(ids) + 8)
    tokens = jnp.asarray([ids], jnp.int32)
    for _ in range(8):
        logits, _, cache = model.score(tokens, cache)
        cache = cache.with_lengths(cache.lengths + tokens.shape[1])
        tokens = logits[:, -1:].argmax(-1).astype(jnp.int32)
        answer.append(int(tokens[0, 0]))
    assert "Paris" in tokenizer.decode(answer), tokenizer.decode(answer)


def test_index_may_name_one_shard(tmp_path):
    write_directory(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    weight_map = dict.fromkeys(llama_tensors(CONFIG), "weights.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoints.load(tmp_path)
