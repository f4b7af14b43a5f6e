"""Llama (1 to 3.3) and what shares its shape, such as SmolLM2 (arXiv 2302.13971, 2407.21783)."""

from typing import Any

from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import (
    Config,
    Family,
    TensorStore,
    WeightTable,
    get,
    hf_activation,
    integer,
    number,
    require,
)
from spec_jax.models.gguf_metadata import (
    EXPERTS_OF_GGUF,
    GGUF_WEIGHTS,
    PAIRED_QK,
    gguf_experts,
    gguf_shape,
)
from spec_jax.models.hf_rope import hf_rope, rope_to_hf

HF_WEIGHTS: WeightTable = {
    "embed": "model.embed_tokens",
    "blocks.{}.attention_norm": "model.layers.{}.input_layernorm",
    "blocks.{}.attention.query": "model.layers.{}.self_attn.q_proj",
    "blocks.{}.attention.key": "model.layers.{}.self_attn.k_proj",
    "blocks.{}.attention.value": "model.layers.{}.self_attn.v_proj",
    "blocks.{}.attention.output": "model.layers.{}.self_attn.o_proj",
    "blocks.{}.mlp_norm": "model.layers.{}.post_attention_layernorm",
    "blocks.{}.mlp.gate": "model.layers.{}.mlp.gate_proj",
    "blocks.{}.mlp.up": "model.layers.{}.mlp.up_proj",
    "blocks.{}.mlp.down": "model.layers.{}.mlp.down_proj",
    "final_norm": "model.norm",
    "head": "lm_head",
}


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `LlamaForCausalLM`."""
    attention_bias = bool(get(config, "attention_bias", False))
    return TransformerConfig.of(
        **hf_shape(config),
        **hf_rope(config),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=bool(get(config, "mlp_bias", False)),
    )


def hf_shape(config: Config) -> dict[str, Any]:
    """What config.json says in the same words for Llama and the families that follow it."""
    require(config, "partial_rotary_factor", 1.0, default=1.0)
    embed_size = integer(config, "hidden_size")
    num_heads = integer(config, "num_attention_heads")
    return {
        "vocab_size": integer(config, "vocab_size"),
        "embed_size": embed_size,
        "num_layers": integer(config, "num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": integer(config, "num_key_value_heads", num_heads),
        "head_dim": integer(config, "head_dim", embed_size // num_heads),
        "mlp_size": integer(config, "intermediate_size"),
        "max_position": integer(config, "max_position_embeddings"),
        "norm_eps": number(config, "rms_norm_eps", 1e-6),
        "activation": hf_activation(config, "silu"),
        "tied_head": bool(get(config, "tie_word_embeddings", False)),
    }


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The config.json of a `LlamaForCausalLM` of this shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **shape_to_hf(config),
        **rope_to_hf(config),
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
    }


def shape_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """What `hf_shape` reads."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_size,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": config.activation,
        "tie_word_embeddings": config.tied_head,
    }


def config_from_gguf(metadata: Config, tensors: TensorStore) -> TransformerConfig:
    """Translates the metadata of a GGUF file of architecture `llama`; Mixtral has experts."""
    shape = gguf_shape(metadata, tensors, "llama")
    return TransformerConfig.of(**shape, experts=gguf_experts(metadata, "llama", shape))


FAMILY = Family(
    model_type="llama",
    config_from_hf=config_from_hf,
    hf_weights=HF_WEIGHTS,
    config_to_hf=config_to_hf,
    gguf_architecture="llama",
    config_from_gguf=config_from_gguf,
    gguf_weights={**GGUF_WEIGHTS, **PAIRED_QK, **EXPERTS_OF_GGUF},
)
