"""Qwen3 (arXiv 2505.09388), dense: Llama with a norm on every query and key head."""

from typing import Any

from spec_jax.models import llama
from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import Config, Family, TensorStore, WeightTable, get
from spec_jax.models.gguf_metadata import GGUF_WEIGHTS, QK_NORMS
from spec_jax.models.hf_rope import hf_rope, rope_to_hf
from spec_jax.models.llama import hf_shape, shape_to_hf
from spec_jax.models.qwen2 import gguf_full_shape, refuse_sliding_window


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `Qwen3ForCausalLM`."""
    refuse_sliding_window(config)
    bias = bool(get(config, "attention_bias", False))
    shape = hf_shape({"head_dim": 128, **config})
    return TransformerConfig.of(
        **shape, **hf_rope(config), qk_norm="head", qkv_bias=bias, output_bias=bias
    )


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The config.json of a `Qwen3ForCausalLM` of this shape."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **shape_to_hf(config),
        **rope_to_hf(config),
        "attention_bias": config.qkv_bias,
    }


def config_from_gguf(metadata: Config, tensors: TensorStore) -> TransformerConfig:
    """Translates the metadata of a GGUF file of architecture `qwen3`."""
    return TransformerConfig.of(**gguf_full_shape(metadata, tensors, "qwen3"), qk_norm="head")


HF_WEIGHTS: WeightTable = {
    **llama.HF_WEIGHTS,
    "blocks.{}.attention.query_norm": "model.layers.{}.self_attn.q_norm",
    "blocks.{}.attention.key_norm": "model.layers.{}.self_attn.k_norm",
}

FAMILY = Family(
    model_type="qwen3",
    config_from_hf=config_from_hf,
    hf_weights=HF_WEIGHTS,
    config_to_hf=config_to_hf,
    gguf_architecture="qwen3",
    config_from_gguf=config_from_gguf,
    gguf_weights={**GGUF_WEIGHTS, **QK_NORMS},
)
