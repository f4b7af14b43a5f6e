"""GPT-NeoX and Pythia (arXiv 2204.06745, 2304.01373): layer norms, partial rotation, fused QKV."""

from typing import Any

import numpy as np

from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import (
    Config,
    Family,
    Part,
    TensorStore,
    activation_to_hf,
    get,
    hf_activation,
    integer,
    number,
)
from spec_jax.models.gguf_metadata import FUSED_QKV, GGUF_WEIGHTS, gguf_shape
from spec_jax.models.hf_rope import hf_rope, rope_to_hf


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `GPTNeoXForCausalLM`."""
    attention_bias = bool(get(config, "attention_bias", True))
    embed_size, num_heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    rope = hf_rope(
        config,
        theta=number(config, "rotary_emb_base", 10000.0),
        fraction=number(config, "rotary_pct", 0.25),
    )
    return TransformerConfig.of(
        vocab_size=integer(config, "vocab_size"),
        embed_size=embed_size,
        num_layers=integer(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=embed_size // num_heads,
        mlp_size=integer(config, "intermediate_size"),
        max_position=integer(config, "max_position_embeddings"),
        norm="layer",
        norm_eps=number(config, "layer_norm_eps", 1e-5),
        activation=hf_activation(config, "gelu"),
        gated_mlp=False,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=True,
        parallel_residual=bool(get(config, "use_parallel_residual", True)),
        tied_head=bool(get(config, "tie_word_embeddings", False)),
        **rope,
    )


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The config.json of a `GPTNeoXForCausalLM` of this shape."""
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_size,
        "max_position_embeddings": config.max_position,
        "layer_norm_eps": config.norm_eps,
        "hidden_act": activation_to_hf(config),
        "attention_bias": config.qkv_bias,
        "use_parallel_residual": config.parallel_residual,
        "tie_word_embeddings": config.tied_head,
        "rotary_pct": config.rotated.fraction,
        "partial_rotary_factor": config.rotated.fraction,
        "rotary_emb_base": config.rotated.theta,
        **rope_to_hf(config),
    }


def _fused(which: int) -> Part:
    """Query (0), key (1) or value (2), which lie next to each other within every head."""

    def total(config: TransformerConfig) -> int:
        return 3 * config.num_heads * config.head_dim

    def rows(config: TransformerConfig) -> np.ndarray:
        heads = np.arange(total(config)).reshape(config.num_heads, 3, config.head_dim)
        return heads[:, which].ravel()

    return Part("gpt_neox.layers.{}.attention.query_key_value", rows, total)


def config_from_gguf(metadata: Config, tensors: TensorStore) -> TransformerConfig:
    """Translates the metadata of a GGUF file of architecture `gptneox`."""
    shape = gguf_shape(metadata, tensors, "gptneox", norm="layer", partial=True)
    return TransformerConfig.of(
        **shape,
        activation="gelu",
        gated_mlp=False,
        parallel_residual=bool(get(metadata, "gptneox.use_parallel_residual", True)),
    )


FAMILY = Family(
    model_type="gpt_neox",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    gguf_architecture="gptneox",
    config_from_gguf=config_from_gguf,
    gguf_weights={**GGUF_WEIGHTS, **FUSED_QKV},
    hf_weights={
        "embed": "gpt_neox.embed_in",
        "blocks.{}.attention_norm": "gpt_neox.layers.{}.input_layernorm",
        "blocks.{}.attention.query": _fused(0),
        "blocks.{}.attention.key": _fused(1),
        "blocks.{}.attention.value": _fused(2),
        "blocks.{}.attention.output": "gpt_neox.layers.{}.attention.dense",
        "blocks.{}.mlp_norm": "gpt_neox.layers.{}.post_attention_layernorm",
        "blocks.{}.mlp.up": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
        "blocks.{}.mlp.down": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
        "final_norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
    },
    buffers=("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias"),
)
