"""A GGUF file of each family is the directory that llama.cpp's converter made it of."""

import dataclasses
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from spec_jax import checkpoints
from spec_jax.checkpoints import hf_writer
from spec_jax.checkpoints.packing import Packing
from spec_jax.errors import CheckpointError
from spec_jax.kernels import PackedWeight
from spec_jax.models import stablelm
from spec_jax.models.config import Experts, TransformerConfig
from spec_jax.models.model import Model
from spec_jax.models.registry import FAMILIES
from spec_jax.models.rotary import LongRopeScaling, YarnScaling
from tests.checkpoints.llama_cpp import ARCHITECTURES, convert
from tests.checkpoints.tiny import CONFIG, write_tokenizer
from tests.often import often
from tests.reshaped import reshaped

BASE = TransformerConfig.of(
    vocab_size=CONFIG["vocab_size"],
    embed_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_size=64,
    max_position=128,
    norm_eps=2.0**-17,  # GGUF keeps float32
)
OLD: dict[str, Any] = {"norm": "layer", "gated_mlp": False, "num_kv_heads": 4, "mlp_size": 128}
BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
LEARNED = OLD | BIASES | {"learned_positions": True, "rope_fraction": 0.0, "tied_head": True}
GEMMA = {"activation": "gelu_tanh", "embedding_scale": 32**0.5, "tied_head": True}
YARN = YarnScaling(4.0, 32, 32.0, 1.0, True, 0.1 * np.log(4.0) + 1)
LONGROPE = LongRopeScaling(
    short=(1.0, 1.25),
    long=(2.0, 4.5),
    original_max_position=16,
    amplitude=(1 + np.log(8) / np.log(16)) ** 0.5,
)
SHAPES: dict[str, dict[str, Any]] = {
    "bloom": OLD
    | BIASES
    | {
        "rope_fraction": 0.0,
        "alibi_scale": 1.0,
        "embedding_norm": True,
        "activation": "gelu_tanh",
    },
    "falcon": OLD
    | {
        "num_kv_heads": 1,
        "activation": "gelu",
        "parallel_residual": True,
        "shared_norm": True,
    },
    "falcon, two norms": OLD
    | {"num_kv_heads": 2, "activation": "gelu", "parallel_residual": True, "tied_head": True},
    "gemma": GEMMA,
    "gemma2": GEMMA
    | {
        "post_norms": True,
        "query_pre_attn_scalar": 8.0,
        "sliding_window": 16,
        "global_every": 2,
        "score_cap": 20.0,
        "logit_cap": 10.0,
    },
    "gemma3_text": GEMMA
    | {
        "post_norms": True,
        "qk_norm": "head",
        "query_pre_attn_scalar": 8.0,
        "sliding_window": 16,
        "global_every": 2,
        "rope_theta": 1e6,
        "local_rope_theta": 1e4,
    },
    "gpt2": LEARNED | {"activation": "gelu_tanh"},
    "gpt_bigcode": LEARNED | {"activation": "gelu_tanh", "num_kv_heads": 1},
    "gpt_neox": OLD
    | BIASES
    | {"activation": "gelu", "parallel_residual": True, "rope_fraction": 0.25},
    "gpt_neox, sequential": OLD | BIASES | {"activation": "gelu"},
    "granite": {
        "query_pre_attn_scalar": 4.0,
        "embedding_scale": 12.0,
        "residual_scale": 0.25,
        "logit_scale": 0.125,
        "tied_head": True,
    },
    "llama": {"rope_theta": 5e5},
    "llama, biases": BIASES | {"rope_factor": 4.0, "head_dim": 12},
    "mistral": {"sliding_window": None},
    "mixtral": {"experts": Experts(count=4, per_token=2, size=64)},
    "olmo2": {"qk_norm": "projection", "pre_norms": False, "post_norms": True},
    "phi3": {"sliding_window": 32},
    "phi3, LongRoPE": {"rope_scaling": LONGROPE, "rope_fraction": 0.5},
    "qwen2": {"qkv_bias": True, "tied_head": True},
    "qwen2, YaRN": {"qkv_bias": True, "rope_scaling": YARN},
    "qwen3": {"qk_norm": "head"},
    "qwen3_moe": {"qk_norm": "head", "experts": Experts(count=4, per_token=2, size=32)},
    "smollm3": {"unrotated_every": 4, "num_layers": 5},
    "stablelm": {"norm": "layer", "qkv_bias": True, "rope_fraction": 0.25},
    "stablelm, parallel": {
        "norm": "layer",
        "parallel_residual": True,
        "shared_norm": True,
        "rope_fraction": 0.5,
    },
    "starcoder2": OLD | BIASES | {"num_kv_heads": 2, "activation": "gelu_tanh", "tied_head": True},
}


def write_directory(name, path):
    """A random model of the family, whose biases and norms matter too."""
    random = np.random.default_rng(0)
    model = Model.random(reshaped(BASE, **SHAPES[name]))
    vectors = {
        name: weight + 0.25 * random.standard_normal(weight.shape).astype(np.float32)
        for name, weight in model.weights.items()
        if weight.ndim == 1
    }
    (family,) = (each for each in FAMILIES if each.model_type == name.split(",")[0])
    # Others may have this shape too.
    with mock.patch.object(hf_writer, "family_of_shape", lambda config: family):
        hf_writer.write_model(path, model.with_weights(vectors), "float32")
    write_tokenizer(path)
    return path


def test_every_architecture_of_the_registry_is_here():
    read = {family.gguf_architecture for family in FAMILIES if family.gguf_architecture}
    assert {name.split(",")[0] for name in SHAPES} == set(ARCHITECTURES)
    assert read == set(ARCHITECTURES.values())


@pytest.mark.parametrize("name", SHAPES)
def test_a_file_is_the_directory(name, tmp_path):
    directory = write_directory(name, tmp_path / "model")
    expected = checkpoints.load(directory)
    found = checkpoints.load(convert(directory, tmp_path / "model.gguf"))
    assert alike(found.model.config, expected.model.config)
    assert found.model.weights.keys() == expected.model.weights.keys()
    for key, weight in found.model.weights.items():
        np.testing.assert_allclose(weight, expected.model.weights[key], rtol=1e-6, err_msg=key)


def alike(found, expected):
    """Whether shapes are equal, but for what float32 rounds."""

    def rounded(config):
        return jax.tree.map(
            lambda each: float(np.float32(each)) if isinstance(each, float) else each,
            dataclasses.asdict(config),
        )

    return rounded(found) == rounded(expected)


@pytest.mark.native
@pytest.mark.parametrize("name", often(["mixtral", "phi3", "qwen3_moe"], ["mixtral", "phi3"]))
@pytest.mark.parametrize("kind", often(["Q8_0", "Q4_1"], ["Q4_1"]))
def test_blocks_of_experts_and_of_fused_matrices_are_kept(name, kind, tmp_path):
    directory = write_directory(name, tmp_path / "model")
    file = convert(directory, tmp_path / "model.gguf", GGMLQuantizationType[kind])
    plain = checkpoints.load(file).model.weights
    kept = checkpoints.load(file, packing=Packing("gguf", native=True)).model.weights
    for key, weight in kept.items():
        matrix = isinstance(weight, PackedWeight)
        assert matrix == (len(plain[key].shape) > 1)
        if matrix:
            expected = {"Q8_0": "int8", "Q4_1": "uint4"}[kind]
            assert weight.format == ("float32" if ".router." in key else expected)
        whole = jax.jit(PackedWeight.dequantize)(weight) if matrix else weight
        np.testing.assert_allclose(whole, plain[key], rtol=2e-7, atol=1e-7, err_msg=key)


def refused(name, tmp_path, edit):
    """The message with which a file is refused whose header was changed."""
    directory = write_directory(name, tmp_path / "model")
    file = convert(directory, tmp_path / "model.gguf")
    data = file.read_bytes()
    changed = edit(data)
    assert changed != data and len(changed) == len(data)
    file.write_bytes(changed)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load(file)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("falcon", b"jploski", b"another", "falcon.tensor_data_layout = 'another'"),
        ("qwen2, YaRN", b"yarn", b"mine", "scaling.type = 'mine'; supported: none, linear, yarn"),
        ("phi3, LongRoPE", b"rope_factors_short", b"rope_factors_shirt", "factors_short.weight'"),
        ("mixtral", b"llama.expert_used_count", b"llama.expert_used_cxunt", "expert_used_count"),
    ],
)
def test_what_is_not_supported_is_named(name, old, new, said, tmp_path):
    assert said in refused(name, tmp_path, lambda data: data.replace(old, new))


def test_stablelm_with_norms_of_queries_is_refused():
    tensors = mock.Mock(shapes={"blk.0.attn_q_norm.weight": (4, 8)})
    with pytest.raises(CheckpointError, match=r"attn_q_norm\.weight', like StableLM 2 12B"):
        stablelm.config_from_gguf({}, tensors)
