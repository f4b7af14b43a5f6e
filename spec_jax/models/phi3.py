"""Phi-3 and Phi-4 (arXiv 2404.14219): Llama with fused projections."""

from typing import Any

from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import Config, Family, TensorStore, fused, qkv_sizes, require, window
from spec_jax.models.gguf_metadata import FUSED_QKV, GGUF_WEIGHTS, gguf_shape
from spec_jax.models.hf_rope import hf_rope, rope_to_hf
from spec_jax.models.llama import HF_WEIGHTS, hf_shape, shape_to_hf


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `Phi3ForCausalLM`."""
    require(config, "attention_bias", False, default=False)
    config = _with_its_rope(config)
    own = {name: value for name, value in config.items() if name != "partial_rotary_factor"}
    shape = hf_shape({"rms_norm_eps": 1e-5, **own})
    return TransformerConfig.of(
        **shape,
        **hf_rope(config),
        sliding_window=window(config, "sliding_window", shape["max_position"]),
    )


def _with_its_rope(config: Config) -> Config:
    """The same config with the name that LongRoPE has by now; Phi-3 called it su, and yarn."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    own = config.get(key) or {}
    if own.get("rope_type", own.get("type")) not in ("su", "yarn"):
        return config
    return {**config, key: {**own, "rope_type": "longrope"}}


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The config.json of a `Phi3ForCausalLM` of this shape."""
    return {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        **shape_to_hf(config),
        **rope_to_hf(config),
        "partial_rotary_factor": config.rotated.fraction,
        "sliding_window": config.sliding_window,
        "pad_token_id": None,
        "original_max_position_embeddings": getattr(
            config.rotated.scaling, "original_max_position", config.max_position
        ),
    }


_QKV = "model.layers.{}.self_attn.qkv_proj"
_GATE_UP = "model.layers.{}.mlp.gate_up_proj"


def _mlp_sizes(config: TransformerConfig) -> tuple[int, int]:
    return config.mlp_size, config.mlp_size


def config_from_gguf(metadata: Config, tensors: TensorStore) -> TransformerConfig:
    """Translates the metadata of a GGUF file of architecture `phi3`."""
    return TransformerConfig.of(**gguf_shape(metadata, tensors, "phi3", partial=True))


FAMILY = Family(
    model_type="phi3",
    config_from_hf=config_from_hf,
    hf_weights={
        **HF_WEIGHTS,
        "blocks.{}.attention.query": fused(_QKV, qkv_sizes, 0),
        "blocks.{}.attention.key": fused(_QKV, qkv_sizes, 1),
        "blocks.{}.attention.value": fused(_QKV, qkv_sizes, 2),
        "blocks.{}.mlp.gate": fused(_GATE_UP, _mlp_sizes, 0),
        "blocks.{}.mlp.up": fused(_GATE_UP, _mlp_sizes, 1),
    },
    config_to_hf=config_to_hf,
    gguf_architecture="phi3",
    config_from_gguf=config_from_gguf,
    gguf_weights={
        **GGUF_WEIGHTS,
        **FUSED_QKV,
        "blocks.{}.mlp.gate": fused("blk.{}.ffn_up", _mlp_sizes, 0),
        "blocks.{}.mlp.up": fused("blk.{}.ffn_up", _mlp_sizes, 1),
    },
    buffers=("rotary_emb.inv_freq", "rope_factors_long.weight", "rope_factors_short.weight"),
)
