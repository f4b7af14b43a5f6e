"""Models of every kind decode the same with and without speculation, on one device and on four."""

from pathlib import Path

import numpy as np
import pytest

from spec_jax import LLM, Layout, SamplingParams, SpeculativeConfig
from spec_jax.checkpoints.hf_writer import write_model
from spec_jax.models.config import Experts, TransformerConfig
from spec_jax.models.model import Model
from tests.checkpoints.tiny import CONFIG, write_tokenizer
from tests.often import often
from tests.reshaped import reshaped

ROOT = Path(__file__).parents[1]
BASE = TransformerConfig.of(
    vocab_size=CONFIG["vocab_size"] - CONFIG["vocab_size"] % 4,
    embed_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    mlp_size=48,
    max_position=128,
    norm_eps=1e-6,
)
OLD = {"norm": "layer", "gated_mlp": False, "mlp_bias": True, "norm_eps": 1e-5}
LEARNED = OLD | {
    "learned_positions": True,
    "rope_fraction": 0.0,
    "qkv_bias": True,
    "output_bias": True,
    "tied_head": True,
}
SHAPES = {
    "bloom": OLD
    | {
        "rope_fraction": 0.0,
        "alibi_scale": 1.0,
        "qkv_bias": True,
        "output_bias": True,
        "embedding_norm": True,
        "activation": "gelu_tanh",
        "mlp_size": 128,
    },
    "gemma2": {
        "activation": "gelu_tanh",
        "embedding_scale": 32**0.5,
        "post_norms": True,
        "query_pre_attn_scalar": 4.0,
        "sliding_window": 5,
        "global_every": 2,
        "score_cap": 2.0,
        "logit_cap": 3.0,
    },
    "codegen": OLD
    | {
        "rope_fraction": 0.5,
        "parallel_residual": True,
        "shared_norm": True,
        "head_bias": True,
        "activation": "gelu_tanh",
    },
    "gpt2": LEARNED | {"activation": "gelu_tanh"},
    "gpt_bigcode": LEARNED | {"num_kv_heads": 1, "activation": "gelu_tanh"},
    "granite": {
        "query_pre_attn_scalar": 4.0,
        "embedding_scale": 3.0,
        "residual_scale": 0.5,
        "logit_scale": 0.25,
    },
    "mixtral": {"experts": Experts(count=8, per_token=2, size=48), "sliding_window": 9},
    "olmo2": {"qk_norm": "projection", "pre_norms": False, "post_norms": True},
    "opt": LEARNED | {"activation": "relu"},
    "qwen3_moe": {
        "qk_norm": "head",
        "experts": Experts(count=8, per_token=3, size=20, normed=False),
        "dense_layers": (1,),
    },
    "smollm3": {"unrotated_every": 2, "rope_theta": 2e6},
}
PROMPTS = ["the inn in the inn in the", "a thin thing", "in"]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
CALLS = {
    "prompt lookup": (None, SpeculativeConfig(method="prompt_lookup", num_speculative_tokens=3)),
    "early exit": (None, SpeculativeConfig(method="early_exit", early_exit_layers=1)),
    "four devices": (Layout.tensor_parallel(4), SpeculativeConfig()),
    "lookup on four": (Layout.tensor_parallel(4), SpeculativeConfig(method="prompt_lookup")),
    "experts over eight": (
        Layout.read(ROOT / "sharding" / "cpu-8-experts.toml"),
        SpeculativeConfig(method="prompt_lookup", verification="block"),
    ),
}


@pytest.fixture(scope="module", params=often(SHAPES, ["qwen3_moe"]))
def model(request, tmp_path_factory):
    """The directory of a random model, whose biases and norms matter too, and what it says."""
    path = tmp_path_factory.mktemp("model")
    random = np.random.default_rng(0)
    made = Model.random(reshaped(BASE, **SHAPES[request.param]))
    vectors = {
        name: weight + 0.3 * random.standard_normal(weight.shape).astype(np.float32)
        for name, weight in made.weights.items()
        if weight.ndim == 1
    }
    write_model(path, made.with_weights(vectors), "float32")
    write_tokenizer(path)
    return str(path), tokens(LLM(str(path)))


def tokens(llm):
    return [out.token_ids for out in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("call", often(CALLS, ["experts over eight"]))
def test_the_text_is_that_of_plain_decoding_on_one_device(model, call):
    path, expected = model
    layout, config = CALLS[call]
    assert tokens(LLM(path, layout=layout, speculative_config=config)) == expected
    assert len(set(map(tuple, expected))) == len(PROMPTS)
