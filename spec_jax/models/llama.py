"""Llama (1 to 3.3) and what shares its shape, such as SmolLM2 (arXiv 2302.13971, 2407.21783)."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from spec_jax.errors import CheckpointError
from spec_jax.models.config import Experts, RopeScaling, TransformerConfig
from spec_jax.models.family import (
    Config,
    Family,
    Part,
    TensorStore,
    WeightTable,
    get,
    hf_activation,
    hf_rope,
    integer,
    number,
    require,
    rope_to_hf,
    window,
)

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

GGUF_WEIGHTS: WeightTable = {
    "embed": "token_embd",
    "blocks.{}.attention_norm": "blk.{}.attn_norm",
    "blocks.{}.attention.query": "blk.{}.attn_q",
    "blocks.{}.attention.key": "blk.{}.attn_k",
    "blocks.{}.attention.value": "blk.{}.attn_v",
    "blocks.{}.attention.output": "blk.{}.attn_output",
    "blocks.{}.mlp_norm": "blk.{}.ffn_norm",
    "blocks.{}.mlp.gate": "blk.{}.ffn_gate",
    "blocks.{}.mlp.up": "blk.{}.ffn_up",
    "blocks.{}.mlp.down": "blk.{}.ffn_down",
    "final_norm": "output_norm",
    "head": "output",
}

EXPERTS_OF_GGUF: WeightTable = {
    "blocks.{}.mlp.router": "blk.{}.ffn_gate_inp",
    "blocks.{}.mlp.expert_gate": "blk.{}.ffn_gate_exps",
    "blocks.{}.mlp.expert_up": "blk.{}.ffn_up_exps",
    "blocks.{}.mlp.expert_down": "blk.{}.ffn_down_exps",
}


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `LlamaForCausalLM`."""
    attention_bias = bool(get(config, "attention_bias", False))
    return TransformerConfig(
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
    rotary_size = integer(metadata, "llama.rope.dimension_count", shape["head_dim"])
    if rotary_size != shape["head_dim"]:
        raise CheckpointError(
            f"llama.rope.dimension_count is {rotary_size}; expected the head's whole width, "
            f"{shape['head_dim']}."
        )
    return TransformerConfig(
        **shape,
        rope_scaling=_gguf_rope_scaling(tensors, shape),
        qkv_bias="blk.0.attn_q.bias" in tensors.shapes,
        output_bias="blk.0.attn_output.bias" in tensors.shapes,
        mlp_bias="blk.0.ffn_down.bias" in tensors.shapes,
        experts=gguf_experts(metadata, "llama", shape),
    )


def gguf_experts(metadata: Config, architecture: str, shape: Mapping[str, Any]) -> Experts | None:
    """The experts that GGUF metadata describe, in every layer."""
    if not metadata.get(f"{architecture}.expert_count"):
        return None
    return Experts(
        count=integer(metadata, f"{architecture}.expert_count"),
        per_token=integer(metadata, f"{architecture}.expert_used_count"),
        size=integer(metadata, f"{architecture}.expert_feed_forward_length", shape["mlp_size"]),
    )


def gguf_shape(metadata: Config, tensors: TensorStore, architecture: str) -> dict[str, Any]:
    """What GGUF metadata says in the same words for Llama and the families that follow it."""

    def size(name: str, default: int | None = None) -> int:
        return integer(metadata, f"{architecture}.{name}", default)

    max_position = size("context_length")
    embed_size, num_heads = size("embedding_length"), size("attention.head_count")
    if "token_embd.weight" not in tensors.shapes:
        raise CheckpointError("the GGUF file has no tensor 'token_embd.weight'.")
    return {
        "vocab_size": tensors.shapes["token_embd.weight"][0],
        "embed_size": embed_size,
        "num_layers": size("block_count"),
        "num_heads": num_heads,
        "num_kv_heads": size("attention.head_count_kv", num_heads),
        "head_dim": size("attention.key_length", embed_size // num_heads),
        "mlp_size": size("feed_forward_length"),
        "max_position": max_position,
        "norm_eps": number(metadata, f"{architecture}.attention.layer_norm_rms_epsilon"),
        "rope_theta": number(metadata, f"{architecture}.rope.freq_base", 10000.0),
        "rope_factor": _gguf_rope_factor(metadata, architecture),
        "sliding_window": window(
            metadata, f"{architecture}.attention.sliding_window", max_position
        ),
        "tied_head": "output.weight" not in tensors.shapes,
    }


def _gguf_rope_factor(metadata: Config, architecture: str) -> float:
    kind = get(metadata, f"{architecture}.rope.scaling.type", "none")
    if kind == "linear":
        return number(metadata, f"{architecture}.rope.scaling.factor")
    require(metadata, f"{architecture}.rope.scaling.type", "none", default="none")
    return 1.0


def _gguf_rope_scaling(tensors: TensorStore, shape: Mapping[str, Any]) -> RopeScaling | None:
    """Llama 3's scaling, which GGUF stores as one divisor per rotary frequency.

    All Llama 3 models share three of the four numbers; the fourth is the largest divisor.
    """
    if "rope_freqs.weight" not in tensors.shapes:
        return None
    divisors = tensors.read("rope_freqs.weight")
    scaling = RopeScaling(
        factor=float(divisors.max()),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=8192,
    )
    exponents = np.arange(0, shape["head_dim"], 2) / shape["head_dim"]
    wavelengths = 2 * math.pi * shape["rope_theta"] ** exponents
    keep = np.clip((scaling.original_max_position / wavelengths - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    expected = 1.0 / ((1 - keep) / scaling.factor + keep)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise CheckpointError(
            "tensor 'rope_freqs.weight' scales the rotary frequencies in another way than "
            "Llama 3, which is the only one supported."
        )
    return scaling


def halves(num_heads: int, head_dim: int, rotary_size: int) -> np.ndarray:
    """Rows of a projection whose heads have the features that are rotated together side by side.

    In the order of the rows they are half a rotation apart, as in our heads.
    """
    rows = np.arange(num_heads * head_dim).reshape(num_heads, head_dim)
    pairs = rows[:, :rotary_size].reshape(num_heads, -1, 2).swapaxes(1, 2)
    return np.concatenate([pairs.reshape(num_heads, -1), rows[:, rotary_size:]], axis=1).ravel()


FAMILY = Family(
    model_type="llama",
    config_from_hf=config_from_hf,
    hf_weights=HF_WEIGHTS,
    config_to_hf=config_to_hf,
    gguf_architecture="llama",
    config_from_gguf=config_from_gguf,
    gguf_weights={
        **GGUF_WEIGHTS,
        **EXPERTS_OF_GGUF,
        "blocks.{}.attention.query": Part(
            "blk.{}.attn_q",
            lambda config: halves(config.num_heads, config.head_dim, config.head_dim),
        ),
        "blocks.{}.attention.key": Part(
            "blk.{}.attn_k",
            lambda config: halves(config.num_kv_heads, config.head_dim, config.head_dim),
        ),
    },
)
