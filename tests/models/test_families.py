"""Every family's translation of configs, and what it refuses to misread."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from spec_jax.errors import CheckpointError
from spec_jax.models import (
    gemma3,
    gpt2,
    gpt_neox,
    llama,
    mistral,
    opt,
    phi3,
    qwen2,
    qwen3,
    smollm3,
    stablelm,
)
from spec_jax.models.family import Part
from spec_jax.models.registry import FAMILIES, family_of_gguf, family_of_hf
from spec_jax.models.rotary import LongRopeScaling, RopeScaling, RotaryConfig
from tests.reshaped import reshaped

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 4096,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GGUF_METADATA = {
    "block_count": 2,
    "context_length": 4096,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-6,
}
GEMMA = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 512,
    "hidden_activation": "gelu_pytorch_tanh",
}
LINEAR = {"rope_type": "linear", "factor": 8.0}
FOLLOWERS = [llama, mistral, qwen2, qwen3]


class Gguf:
    """A GGUF file's tensors, as far as configs look at them."""

    path = Path("tiny.gguf")
    stored = "float32"

    def __init__(self, **tensors):
        self.tensors = {"token_embd.weight": np.zeros((100, 32))} | tensors

    @property
    def shapes(self):
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def read(self, name, part=()):
        return self.tensors[name][part]

    def read_quantized(self, name):
        return None


def test_defaults_of_an_old_config():
    config = llama.config_from_hf(LLAMA)
    assert (config.num_kv_heads, config.head_dim) == (4, 8)
    assert (config.norm_eps, config.activation, config.tied_head) == (1e-6, "silu", False)
    assert {layer.rotary for layer in config.layers} == {RotaryConfig(10000.0, 1.0, 1.0, None)}
    assert (
        not (config.qkv_bias or config.output_bias or config.mlp_bias) and config.qk_norm == "none"
    )


def test_both_spellings_of_rotary_settings():
    expected = RopeScaling(8.0, 1.0, 4.0, 8192)
    new = dict(LLAMA, rope_parameters=dict(LLAMA3_SCALING, rope_theta=5e5))
    old = dict(LLAMA, rope_theta=5e5, rope_scaling=LLAMA3_SCALING)
    oldest = dict(old, rope_scaling=dict(LLAMA3_SCALING, type="llama3"))
    del oldest["rope_scaling"]["rope_type"]
    for config in map(llama.config_from_hf, (new, old, oldest)):
        assert (config.rotated.theta, config.rotated.scaling) == (5e5, expected)
    plain = dict(LLAMA, rope_theta=5e5, rope_scaling=None)
    assert llama.config_from_hf(plain).rotated.theta == 5e5
    assert llama.config_from_hf(plain).rotated.scaling is None


@pytest.mark.parametrize("family", [llama, phi3], ids=["llama", "phi3"])
def test_rope_scaling_stands_in_the_place_of_rope_parameters(family):
    """As transformers 5 reads both, unless it would then forget a setting."""
    scaling = {"llama": LLAMA3_SCALING, "phi3": LONGROPE | {"type": "su"}}[family.FAMILY.model_type]
    scaling = {name: value for name, value in scaling.items() if name != "rope_theta"}
    config = LLAMA | {"rope_theta": 5e5, "rope_scaling": scaling}
    plain = {"rope_type": "default", "rope_theta": 5e5}
    both = config | {"rope_parameters": plain}
    assert family.config_from_hf(both) == family.config_from_hf(config)
    assert family.config_from_hf(both).rotated.scaling is not None
    with pytest.raises(CheckpointError, match="would ignore partial_rotary_factor of"):
        family.config_from_hf(config | {"rope_parameters": plain | {"partial_rotary_factor": 1.0}})
    del both["rope_theta"]
    with pytest.raises(CheckpointError, match="would ignore rope_theta of"):
        family.config_from_hf(both)


def test_scaling_beside_settings_of_each_kind_of_layers_is_refused():
    nested = {f"{kind}_attention": {"rope_theta": 500.0} for kind in ("full", "sliding")}
    both = LLAMA | GEMMA | {"rope_parameters": nested, "rope_scaling": LINEAR}
    with pytest.raises(CheckpointError, match="would ignore full_attention, sliding_attention"):
        gemma3.config_from_hf(both)


def test_null_means_absent():
    config = llama.config_from_hf(dict(LLAMA, head_dim=None, num_key_value_heads=None))
    assert (config.num_kv_heads, config.head_dim) == (4, 8)


def test_what_sets_the_families_apart():
    mistral_config = mistral.config_from_hf(dict(LLAMA, sliding_window=None))
    assert mistral_config == llama.config_from_hf(LLAMA)
    assert mistral.config_from_hf(dict(LLAMA, sliding_window=4096)) == mistral_config
    assert mistral.config_from_hf(LLAMA) == mistral_config  # the first version's 4096
    windowed = mistral.config_from_hf(dict(LLAMA, sliding_window=1024))
    assert windowed == reshaped(mistral_config, sliding_window=1024)
    assert [layer.window for layer in windowed.layers] == [1024, 1024]
    config = qwen2.config_from_hf(dict(LLAMA, use_sliding_window=False, sliding_window=8))
    assert config.qkv_bias and not config.output_bias
    config = qwen3.config_from_hf(LLAMA)
    assert config.qk_norm == "head" and config.head_dim == 128 and not config.qkv_bias
    config = llama.config_from_hf(dict(LLAMA, attention_bias=True, mlp_bias=True))
    assert config.qkv_bias and config.output_bias and config.mlp_bias


def test_positions_may_all_be_scaled():
    for rope in ({"rope_scaling": LINEAR}, {"rope_parameters": LINEAR | {"rope_theta": 1e4}}):
        config = llama.config_from_hf(LLAMA | rope)
        assert config == reshaped(llama.config_from_hf(LLAMA), rope_factor=8.0)


def test_gemma3_of_transformers_4_and_5():
    nested = {
        "full_attention": LINEAR | {"rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }
    kinds = ["sliding_attention", "full_attention"]
    new = LLAMA | GEMMA | {"layer_types": kinds, "rope_parameters": nested}
    old = {"sliding_window_pattern": 2, "rope_theta": 5e5, "rope_local_base_freq": 500.0}
    config = gemma3.config_from_hf(new)
    assert config == gemma3.config_from_hf(LLAMA | GEMMA | old | {"rope_scaling": LINEAR})
    rotary = {bool(layer.window): layer.rotary for layer in config.layers}
    assert rotary == {False: RotaryConfig(5e5, factor=8.0), True: RotaryConfig(500.0)}
    assert (config.head_dim, config.query_pre_attn_scalar) == (16, 24.0)
    assert config.qk_norm == "head" and config.post_norms and config.tied_head
    assert config.embedding_scale == 32**0.5
    assert [bool(layer.window) for layer in config.layers] == [True, False]
    longer = gemma3.config_from_hf(LLAMA | GEMMA | old | {"num_hidden_layers": 4})
    assert [bool(layer.window) for layer in longer.layers] == [True, False, True, False]


def test_defaults_of_gemma3():
    config = gemma3.config_from_hf(LLAMA)
    assert (config.head_dim, config.query_pre_attn_scalar, config.activation) == (
        256,
        256.0,
        "gelu_tanh",
    )
    config = gemma3.config_from_hf(LLAMA | {"num_hidden_layers": 18})
    assert config.sliding_window == 4096
    rotary = {bool(layer.window): layer.rotary for layer in config.layers}
    assert rotary == {False: RotaryConfig(1e6), True: RotaryConfig(1e4)}
    assert [i for i, layer in enumerate(config.layers) if not layer.window] == [5, 11, 17]
    only_local = gemma3.config_from_hf(LLAMA | {"layer_types": ["sliding_attention"] * 2})
    assert all(layer.window for layer in only_local.layers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_activation": "mish"}, "hidden_activation = 'mish'; supported: silu"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "at regular intervals"),
        ({"layer_types": ["sliding_attention"]}, "one for each layer"),
        ({"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ({"rope_parameters": {"sliding_attention": LINEAR}}, "must not be scaled"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "short_factor = None"),
        ({"sliding_window": 0}, "sliding_window = 0"),
    ],
)
def test_refused_by_gemma3(changes, message):
    with pytest.raises(CheckpointError) as caught:
        gemma3.config_from_hf(LLAMA | GEMMA | changes)
    assert message in str(caught.value)


def test_gemma3_that_sees_images_is_refused():
    with pytest.raises(CheckpointError, match=r"text and images; .*'gemma3_text'.*\.gguf file"):
        family_of_hf("gemma3")


def test_gpt_neox():
    config = gpt_neox.config_from_hf(LLAMA)
    assert (config.norm, config.gated_mlp, config.activation) == ("layer", False, "gelu")
    assert config.parallel_residual and config.mlp_bias and config.qkv_bias and config.output_bias
    assert (config.rotated.fraction, config.rotated.size(config.head_dim)) == (0.25, 2)
    old = gpt_neox.config_from_hf(dict(LLAMA, rotary_pct=0.5, rotary_emb_base=500))
    assert (old.rotated.fraction, old.rotated.theta) == (0.5, 500.0)
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    assert gpt_neox.config_from_hf(dict(LLAMA, rope_parameters=rope)) == old


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}


def test_longrope_as_phi3_has_it():
    lengths = {"original_max_position_embeddings": 16, "max_position_embeddings": 64}
    scaling = {**LONGROPE, "original_max_position_embeddings": 4}
    parsed = phi3.config_from_hf(LLAMA | lengths | {"rope_parameters": scaling}).rotated.scaling
    assert parsed == LongRopeScaling(
        short=(1.0, 1.5, 2.0, 2.5),
        long=(2.0, 3.0, 4.0, 5.0),
        original_max_position=16,
        amplitude=math.sqrt(1 + math.log(4) / math.log(16)),
    )
    assert (parsed.divisors(16), parsed.divisors(17)) == (parsed.short, parsed.long)
    for older in ("su", "yarn"):
        names = {"type": older} | {key: LONGROPE[key] for key in ("short_factor", "long_factor")}
        old = phi3.config_from_hf(LLAMA | lengths | {"rope_scaling": names, "rope_theta": 500.0})
        assert old.rotated.scaling == parsed and old.rotated.theta == 500.0
    louder = phi3.config_from_hf(LLAMA | lengths | {"rope_parameters": scaling | {"factor": 1.0}})
    assert louder.rotated.scaling.amplitude == 1.0


def test_dynamic_scaling_begins_past_the_context():
    scaled = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    assert llama.config_from_hf(LLAMA | scaled) == llama.config_from_hf(LLAMA)


@pytest.mark.parametrize("family", FOLLOWERS, ids=lambda family: family.FAMILY.model_type)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "mish"}, "hidden_act = 'mish'; supported: silu"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "'ntk'"),
        ({"rope_parameters": LONGROPE | {"long_factor": None}}, "long_factor = None; expected a l"),
        ({"rope_parameters": LONGROPE | {"short_factor": [1.0, "2"]}}, "short_factor = '2'"),
        ({"rope_parameters": LONGROPE | {"short_factor": [1.0] * 3}}, "short factors are (1.0, 1."),
        ({"rope_parameters": LONGROPE | {"long_factor": [0.0] * 4}}, "numbers > 0"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "same in every layer"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "no 'factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_theta": "1e4"}, "rope_theta = '1e4'; expected a number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan"),
        ({"vocab_size": None}, "no 'vocab_size'"),
        ({"hidden_size": "32"}, "hidden_size = '32'; expected an integer"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"num_key_value_heads": 3}, "3 KV heads do not divide 4"),
        ({"num_attention_heads": [4, 8]}, "one value per layer"),
        ({"head_dim": 7}, "7 rotated dimensions"),
    ],
)
def test_refused(family, changes, message):
    config = dict(LLAMA, sliding_window=None) | changes
    with pytest.raises(CheckpointError) as caught:
        family.config_from_hf(config)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (mistral, {"sliding_window": -1}, "sliding_window = -1; expected an integer"),
        (qwen2, {"use_sliding_window": True}, "use_sliding_window = True"),
        (qwen3, {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        (gpt_neox, {"hidden_act": "mish"}, "hidden_act = 'mish'"),
    ],
)
def test_refused_by_one_family(family, changes, message):
    with pytest.raises(CheckpointError) as caught:
        family.config_from_hf(LLAMA | changes)
    assert message in str(caught.value)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_gguf(architecture):
    metadata = {f"{architecture}.{key}": value for key, value in GGUF_METADATA.items()}
    family = family_of_gguf(architecture)
    config = family.config_from_gguf(metadata, Gguf())
    as_hf = dict(LLAMA, tie_word_embeddings=True, head_dim=8)
    assert config == family.config_from_hf(as_hf)
    config = family.config_from_gguf(metadata, Gguf(**{"output.weight": np.zeros((100, 32))}))
    assert not config.tied_head
    with pytest.raises(CheckpointError, match="token_embd"):
        family.config_from_gguf(metadata, type("Empty", (Gguf,), {"shapes": {}})())
    with pytest.raises(CheckpointError, match="one value per layer"):
        metadata[f"{architecture}.attention.head_count"] = [4, 4]
        family.config_from_gguf(metadata, Gguf())


def test_gguf_of_gemma3():
    """Older files leave out what llama.cpp has always assumed."""
    metadata = {f"gemma3.{key}": value for key, value in GGUF_METADATA.items()}
    metadata |= {"gemma3.attention.key_length": 256, "gemma3.attention.sliding_window": 512}
    family = family_of_gguf("gemma3")
    config = family.config_from_gguf(metadata, Gguf())
    assert config == gemma3.config_from_hf(LLAMA | {"sliding_window": 512})
    metadata |= {
        "gemma3.attention.sliding_window_pattern": 2,
        "gemma3.rope.freq_base": 5e5,
        "gemma3.rope.freq_base_swa": 500.0,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
    }
    config = family.config_from_gguf(metadata, Gguf())
    assert [bool(layer.window) for layer in config.layers] == [True, False]
    assert [layer.rotary for layer in config.layers] == [
        RotaryConfig(500.0),
        RotaryConfig(5e5, factor=8.0),
    ]
    of_27b = family.config_from_gguf(metadata | {"gemma3.block_count": 62}, Gguf())
    assert of_27b.query_pre_attn_scalar == 32 / 4  # width over heads
    with pytest.raises(CheckpointError, match="softcapping"):
        family.config_from_gguf(metadata | {"gemma3.final_logit_softcapping": 30.0}, Gguf())


def test_windows_and_scaling_in_gguf():
    metadata = {f"llama.{key}": value for key, value in GGUF_METADATA.items()}
    plain = llama.FAMILY.config_from_gguf(metadata, Gguf())
    assert llama.FAMILY.config_from_gguf(
        metadata | {"llama.attention.sliding_window": 4096}, Gguf()
    ) == (plain)
    windowed = llama.FAMILY.config_from_gguf(
        metadata | {"llama.attention.sliding_window": 64}, Gguf()
    )
    assert windowed == reshaped(plain, sliding_window=64)
    with pytest.raises(CheckpointError, match=r"rope\.scaling\.type = 'su'; supported: none, lin"):
        llama.FAMILY.config_from_gguf(metadata | {"llama.rope.scaling.type": "su"}, Gguf())
    for kind in ("linear", "yarn"):
        with pytest.raises(CheckpointError, match=r"no 'llama\.rope\.scaling\.factor'"):
            llama.FAMILY.config_from_gguf(metadata | {"llama.rope.scaling.type": kind}, Gguf())


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_windows_of_qwen_are_refused(architecture):
    metadata = {f"{architecture}.{key}": value for key, value in GGUF_METADATA.items()}
    metadata[f"{architecture}.attention.sliding_window"] = 64
    with pytest.raises(CheckpointError, match="sliding_window is 64, less than the context of"):
        family_of_gguf(architecture).config_from_gguf(metadata, Gguf())


def test_gguf_biases_are_seen_in_the_tensors():
    metadata = {f"llama.{key}": value for key, value in GGUF_METADATA.items()}
    biases = {"blk.0.attn_q.bias": np.zeros(32), "blk.0.ffn_down.bias": np.zeros(32)}
    config = llama.FAMILY.config_from_gguf(metadata, Gguf(**biases))
    assert config.qkv_bias and config.mlp_bias and not config.output_bias


def test_registry():
    assert len({family.model_type for family in FAMILIES}) == len(FAMILIES)
    for family in FAMILIES:
        assert family_of_hf(family.model_type) is family
    assert family_of_gguf("llama") is llama.FAMILY
    for missing in ("mamba", None):
        with pytest.raises(CheckpointError, match="knows bloom, codegen, falcon, gemma"):
            family_of_hf(missing)
    with pytest.raises(CheckpointError, match="knows bloom, falcon, gemma, gemma2, gemma3"):
        family_of_gguf("gpt_neox")


def test_layers_without_positions_are_at_regular_intervals():
    four = smollm3.config_from_hf(LLAMA | {"num_hidden_layers": 4})
    assert [bool(layer.rotary) for layer in four.layers] == [True, True, True, False]
    every = smollm3.config_from_hf(LLAMA | {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]})
    assert [bool(layer.rotary) for layer in every.layers] == [True, False, True, False]
    with pytest.raises(CheckpointError, match=r"no_rope_layers = \[0, 1\]; supported: one for"):
        smollm3.config_from_hf(LLAMA | {"no_rope_layers": [0, 1]})


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (gpt2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
        (gpt2, {"scale_attn_weights": False}, "scale_attn_weights = False"),
        (opt, {"do_layer_norm_before": False}, "do_layer_norm_before = False"),
        (opt, {"word_embed_proj_dim": 16}, "word_embed_proj_dim = 16"),
        (phi3, {"rope_scaling": {"type": "su"}}, "short_factor = None"),
        (stablelm, {"qk_layernorm": True}, "qk_layernorm = True"),
    ],
)
def test_what_other_families_refuse(family, changes, message):
    shape = LLAMA | {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128, "ffn_dim": 64}
    family.config_from_hf(shape)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        family.config_from_hf(shape | changes)


def test_names_without_their_prefix_are_read():
    """As openai-community/gpt2 has them."""
    shape = llama.config_from_hf(LLAMA)
    named = gpt2.FAMILY.hf_weights_of(shape, Gguf(**{"transformer.wte.weight": np.zeros(1)}))
    bare = gpt2.FAMILY.hf_weights_of(shape, Gguf(**{"wte.weight": np.zeros(1)}))
    assert named["positions"] == "transformer.wpe" and bare["positions"] == "wpe"
    query = bare["blocks.{}.attention.query"]
    assert isinstance(query, Part) and query.name == "h.{}.attn.c_attn"
