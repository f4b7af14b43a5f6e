"""BLOOM (arXiv 2211.05100): ALiBi instead of positions, a norm after the embedding."""

from typing import Any

import numpy as np

from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import Config, Family, Part, TensorStore, integer, number, require
from spec_jax.models.gguf_metadata import FUSED_QKV, GGUF_WEIGHTS, gguf_shape
from spec_jax.models.gpt2 import hf_tied

_MAX_POSITION = 2048
"""What they were trained for; config.json seldom says."""


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `BloomForCausalLM`."""
    require(config, "apply_residual_connection_post_layernorm", False, default=False)
    embed_size = integer({"hidden_size": config.get("n_embed"), **config}, "hidden_size")
    num_heads = integer({"n_head": config.get("num_attention_heads"), **config}, "n_head")
    return TransformerConfig.of(
        vocab_size=integer(config, "vocab_size"),
        embed_size=embed_size,
        num_layers=integer({"n_layer": config.get("num_hidden_layers"), **config}, "n_layer"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=embed_size // num_heads,
        mlp_size=4 * embed_size,
        max_position=integer(config, "seq_length", _MAX_POSITION),
        norm="layer",
        norm_eps=number(config, "layer_norm_epsilon", 1e-5),
        activation="gelu_tanh",
        gated_mlp=False,
        rope_fraction=0.0,
        alibi_scale=1.0,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        embedding_norm=True,
        tied_head=hf_tied(config),
    )


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The config.json of a `BloomForCausalLM` of this shape."""
    return {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "seq_length": config.max_position,
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tied_head,
    }


def grouped(name: str, which: int) -> Part:
    """Query (0), key (1) or value (2), where each key/value head follows its query heads."""

    def total(config: TransformerConfig) -> int:
        return (config.num_heads + 2 * config.num_kv_heads) * config.head_dim

    def rows(config: TransformerConfig) -> np.ndarray:
        heads = np.arange(total(config)).reshape(config.num_kv_heads, -1, config.head_dim)
        return np.split(heads, [-2, -1], axis=1)[which].ravel()

    return Part(name, rows, total)


_QKV = "transformer.h.{}.self_attention.query_key_value"


def config_from_gguf(metadata: Config, tensors: TensorStore) -> TransformerConfig:
    """Translates the metadata of a GGUF file of architecture `bloom`."""
    shape = gguf_shape(metadata, tensors, "bloom", norm="layer")
    return TransformerConfig.of(
        **shape
        | {
            "activation": "gelu_tanh",
            "gated_mlp": False,
            "rope_fraction": 0.0,
            "alibi_scale": 1.0,
            "embedding_norm": True,
        }
    )


FAMILY = Family(
    model_type="bloom",
    config_from_hf=config_from_hf,
    hf_weights={
        "embed": "transformer.word_embeddings",
        "embedding_norm": "transformer.word_embeddings_layernorm",
        "blocks.{}.attention_norm": "transformer.h.{}.input_layernorm",
        "blocks.{}.attention.query": grouped(_QKV, 0),
        "blocks.{}.attention.key": grouped(_QKV, 1),
        "blocks.{}.attention.value": grouped(_QKV, 2),
        "blocks.{}.attention.output": "transformer.h.{}.self_attention.dense",
        "blocks.{}.mlp_norm": "transformer.h.{}.post_attention_layernorm",
        "blocks.{}.mlp.up": "transformer.h.{}.mlp.dense_h_to_4h",
        "blocks.{}.mlp.down": "transformer.h.{}.mlp.dense_4h_to_h",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
    config_to_hf=config_to_hf,
    gguf_architecture="bloom",
    config_from_gguf=config_from_gguf,
    gguf_weights={**GGUF_WEIGHTS, **FUSED_QKV, "embedding_norm": "token_embd_norm"},
    prefix="transformer.",
)
