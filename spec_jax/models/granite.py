"""Granite 3 (IBM 2024): Llama with multipliers of embedding, scores, residuals and logits."""

from typing import Any

from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import Config, Family, TensorStore, number, require
from spec_jax.models.gguf_metadata import GGUF_WEIGHTS, PAIRED_QK, gguf_shape
from spec_jax.models.llama import ALL_BIASES, HF_WEIGHTS, hf_shape, shape_to_hf

_NAMES = {
    **ALL_BIASES,
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
}


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `GraniteForCausalLM`."""
    return TransformerConfig.of(
        **hf_shape(config, _NAMES, embedding_scale=1.0, residual_scale=1.0),
        query_pre_attn_scalar=number(config, "attention_multiplier", 1.0) ** -2,
        logit_scale=1 / number(config, "logits_scaling", 1.0),
    )


def fields_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The inverse of `config_from_hf`."""
    return {
        **shape_to_hf(config, _NAMES),
        "attention_multiplier": (config.query_pre_attn_scalar or config.head_dim) ** -0.5,
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
    hf_class="GraniteForCausalLM",
    config_from_hf=config_from_hf,
    fields_to_hf=fields_to_hf,
    hf_weights=HF_WEIGHTS,
    gguf_architecture="granite",
    config_from_gguf=config_from_gguf,
    gguf_weights={**GGUF_WEIGHTS, **PAIRED_QK},
)
