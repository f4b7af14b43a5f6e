"""Granite 3 (IBM 2024): Llama with multipliers of embedding, scores, residuals and logits."""

from typing import Any

from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import Config, Family, TensorStore, get, number, require
from spec_jax.models.gguf_metadata import GGUF_WEIGHTS, PAIRED_QK, gguf_shape
from spec_jax.models.hf_rope import hf_rope, rope_to_hf
from spec_jax.models.llama import HF_WEIGHTS, hf_shape, shape_to_hf


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `GraniteForCausalLM`."""
    bias = bool(get(config, "attention_bias", False))
    return TransformerConfig.of(
        **hf_shape(config),
        **hf_rope(config),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(get(config, "mlp_bias", False)),
        query_pre_attn_scalar=number(config, "attention_multiplier", 1.0) ** -2,
        embedding_scale=number(config, "embedding_multiplier", 1.0),
        residual_scale=number(config, "residual_multiplier", 1.0),
        logit_scale=1 / number(config, "logits_scaling", 1.0),
    )


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The config.json of a `GraniteForCausalLM` of this shape."""
    return {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        **shape_to_hf(config),
        **rope_to_hf(config),
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "attention_multiplier": (config.query_pre_attn_scalar or config.head_dim) ** -0.5,
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": config.residual_scale,
        "logits_scaling": 1 / config.logit_scale,
    }


def config_from_gguf(metadata: Config, tensors: TensorStore) -> TransformerConfig:
    """Translates the metadata of a GGUF file of architecture `granite`."""
    require(metadata, "granite.expert_count", 0, default=0)
    require(metadata, "granite.rope.scaling.finetuned", True, default=True)
    shape = gguf_shape(metadata, tensors, "granite")
    scale = number(metadata, "granite.attention.scale", shape["head_dim"] ** -0.5)
    return TransformerConfig.of(
        **shape,
        query_pre_attn_scalar=scale**-2,
        embedding_scale=number(metadata, "granite.embedding_scale", 1.0),
        residual_scale=number(metadata, "granite.residual_scale", 1.0),
        logit_scale=1 / number(metadata, "granite.logit_scale"),
    )


FAMILY = Family(
    model_type="granite",
    config_from_hf=config_from_hf,
    hf_weights=HF_WEIGHTS,
    config_to_hf=config_to_hf,
    gguf_architecture="granite",
    config_from_gguf=config_from_gguf,
    gguf_weights={**GGUF_WEIGHTS, **PAIRED_QK},
)
