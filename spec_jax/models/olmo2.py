"""OLMo 2 (arXiv 2501.00656): norms after attention and MLP, and over whole queries and keys."""

from typing import Any

from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import Config, Family, TensorStore, get
from spec_jax.models.gemma import GGUF_NORMS
from spec_jax.models.gguf_metadata import GGUF_WEIGHTS, QK_NORMS
from spec_jax.models.hf_rope import hf_rope, rope_to_hf
from spec_jax.models.llama import HF_WEIGHTS, hf_shape, shape_to_hf
from spec_jax.models.qwen2 import gguf_full_shape


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of an `Olmo2ForCausalLM`."""
    bias = bool(get(config, "attention_bias", False))
    return TransformerConfig.of(
        **hf_shape({"rms_norm_eps": 1e-5, **config}),
        **hf_rope(config),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="projection",
        pre_norms=False,
        post_norms=True,
    )


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The config.json of an `Olmo2ForCausalLM` of this shape."""
    return {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        **shape_to_hf(config),
        **rope_to_hf(config),
        "attention_bias": config.qkv_bias,
    }


_PRE_NORMS = ("blocks.{}.attention_norm", "blocks.{}.mlp_norm")


def config_from_gguf(metadata: Config, tensors: TensorStore) -> TransformerConfig:
    """Translates the metadata of a GGUF file of architecture `olmo2`.

    OLMo 3 is of the same architecture, and has windows in some layers.
    """
    shape = gguf_full_shape(metadata, tensors, "olmo2")
    return TransformerConfig.of(**shape, qk_norm="projection", pre_norms=False, post_norms=True)


FAMILY = Family(
    model_type="olmo2",
    config_from_hf=config_from_hf,
    hf_weights={
        **{name: entry for name, entry in HF_WEIGHTS.items() if name not in _PRE_NORMS},
        "blocks.{}.attention.query_norm": "model.layers.{}.self_attn.q_norm",
        "blocks.{}.attention.key_norm": "model.layers.{}.self_attn.k_norm",
        "blocks.{}.attention_post_norm": "model.layers.{}.post_attention_layernorm",
        "blocks.{}.mlp_post_norm": "model.layers.{}.post_feedforward_layernorm",
    },
    config_to_hf=config_to_hf,
    gguf_architecture="olmo2",
    config_from_gguf=config_from_gguf,
    gguf_weights={
        **GGUF_WEIGHTS,
        **QK_NORMS,
        **GGUF_NORMS,
    },
)
