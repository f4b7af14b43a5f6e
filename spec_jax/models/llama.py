"""Llama (1 to 3.3) and what shares its shape, such as SmolLM2 (arXiv 2302.13971, 2407.21783)."""

from collections.abc import Mapping
from typing import Any

from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import (
    Config,
    Family,
    WeightTable,
    attention_names,
    read_fields,
    require,
    write_fields,
)
from spec_jax.models.gguf_metadata import EXPERTS_OF_GGUF, GGUF_WEIGHTS, PAIRED_QK, gguf_config
from spec_jax.models.hf_rope import hf_rope, rope_to_hf

HF_NAMES: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "embed_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_size": "intermediate_size",
    "max_position": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
    "tied_head": "tie_word_embeddings",
}
"""Keys in config.json of fields that Llama shares with the families that follow it."""

ATTENTION_BIAS = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}
ALL_BIASES = {**ATTENTION_BIAS, "mlp_bias": "mlp_bias"}

HF_WEIGHTS: WeightTable = {
    "embed": "model.embed_tokens",
    "blocks.{}.attention_norm": "model.layers.{}.input_layernorm",
    **attention_names(
        "blocks.{}.attention", "model.layers.{}.self_attn", ("q_proj", "k_proj", "v_proj", "o_proj")
    ),
    "blocks.{}.mlp_norm": "model.layers.{}.post_attention_layernorm",
    "blocks.{}.mlp.gate": "model.layers.{}.mlp.gate_proj",
    "blocks.{}.mlp.up": "model.layers.{}.mlp.up_proj",
    "blocks.{}.mlp.down": "model.layers.{}.mlp.down_proj",
    "final_norm": "model.norm",
    "head": "lm_head",
}


def hf_shape(
    config: Config,
    names: Mapping[str, str] = {},
    *,
    theta: float = 10000.0,
    fraction: float | None = None,
    **defaults: Any,
) -> dict[str, Any]:
    """Arguments of `TransformerConfig.of` for families that store them as Llama does.

    Args:
      config: config.json.
      names: the keys of more fields, or other keys of those in `HF_NAMES`.
      theta: see `hf_rope`.
      fraction: see `hf_rope`; without it a config that rotates a part of each head is refused.
      **defaults: see `read_fields`.
    """
    if fraction is None:
        require(config, "partial_rotary_factor", 1.0, default=1.0)
    defaults = {"norm_eps": 1e-6, "activation": "silu", **defaults}
    return {
        **read_fields(config, {**HF_NAMES, **names}, **defaults),
        **hf_rope(config, theta=theta, fraction=fraction or 1.0),
    }


def shape_to_hf(config: TransformerConfig, names: Mapping[str, str] = {}) -> dict[str, Any]:
    """The keys that `hf_shape` reads."""
    return {**write_fields(config, {**HF_NAMES, **names}), **rope_to_hf(config)}


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `LlamaForCausalLM`."""
    return TransformerConfig.of(**hf_shape(config, ALL_BIASES))


FAMILY = Family(
    model_type="llama",
    hf_class="LlamaForCausalLM",
    config_from_hf=config_from_hf,
    fields_to_hf=lambda config: shape_to_hf(config, ALL_BIASES),
    hf_weights=HF_WEIGHTS,
    gguf_architecture="llama",
    config_from_gguf=gguf_config("llama", sparse=True),
    gguf_weights={**GGUF_WEIGHTS, **PAIRED_QK, **EXPERTS_OF_GGUF},
)
