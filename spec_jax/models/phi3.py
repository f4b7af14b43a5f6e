"""Phi-3 and Phi-4 (arXiv 2404.14219): Llama with fused projections."""

from typing import Any

from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import Config, Family, fused, in_qkv, qkv_sizes, require, window
from spec_jax.models.gguf_metadata import FUSED_QKV, GGUF_WEIGHTS, gguf_config
from spec_jax.models.hf_rope import rope_settings
from spec_jax.models.llama import HF_WEIGHTS, hf_shape, shape_to_hf


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `Phi3ForCausalLM`."""
    require(config, "attention_bias", False, default=False)
    shape = hf_shape(_with_longrope({"rms_norm_eps": 1e-5, **config}), fraction=1.0)
    shape["sliding_window"] = window(config, "sliding_window", shape["max_position"])
    return TransformerConfig.of(**shape)


def _with_longrope(config: Config) -> Config:
    """The same config with today's name of LongRoPE, which Phi-3 called su, and yarn."""
    settings = rope_settings(config)
    if settings.get("rope_type", settings.get("type")) not in ("su", "yarn"):
        return config
    renamed = {**settings, "rope_type": "longrope"}
    return {**config, "rope_parameters": renamed, "rope_scaling": None}


def fields_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The inverse of `config_from_hf`."""
    return {
        **shape_to_hf(config),
        "partial_rotary_factor": config.rotated.fraction,
        "sliding_window": config.sliding_window,
        "pad_token_id": None,
        "original_max_position_embeddings": getattr(
            config.rotated.scaling, "original_max_position", config.max_position
        ),
    }


def _gate_up(name: str) -> dict[str, Any]:
    def sizes(config: TransformerConfig) -> tuple[int, int]:
        return config.mlp_size, config.mlp_size

    return {
        "blocks.{}.mlp.gate": fused(name, sizes, 0),
        "blocks.{}.mlp.up": fused(name, sizes, 1),
    }


FAMILY = Family(
    model_type="phi3",
    hf_class="Phi3ForCausalLM",
    config_from_hf=config_from_hf,
    fields_to_hf=fields_to_hf,
    hf_weights={
        **HF_WEIGHTS,
        **in_qkv(lambda which: fused("model.layers.{}.self_attn.qkv_proj", qkv_sizes, which)),
        **_gate_up("model.layers.{}.mlp.gate_up_proj"),
    },
    gguf_architecture="phi3",
    config_from_gguf=gguf_config("phi3", partial=True),
    gguf_weights={**GGUF_WEIGHTS, **FUSED_QKV, **_gate_up("blk.{}.ffn_up")},
    buffers=("rotary_emb.inv_freq", "rope_factors_long.weight", "rope_factors_short.weight"),
)
