"""OPT (arXiv 2205.01068): learned positions from the table's third row on, ReLU."""

from typing import Any

import numpy as np

from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import Config, Family, Part, hf_activation, integer, require
from spec_jax.models.gpt2 import hf_tied

_FIRST = 2
"""The row of position 0."""


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of an `OPTForCausalLM`."""
    for name in ("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine"):
        require(config, name, True, default=True)
    require(config, "_remove_final_layer_norm", False, default=False)
    embed_size, num_heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    require(config, "word_embed_proj_dim", embed_size, default=embed_size)
    return TransformerConfig.of(
        vocab_size=integer(config, "vocab_size"),
        embed_size=embed_size,
        num_layers=integer(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=embed_size // num_heads,
        mlp_size=integer(config, "ffn_dim"),
        max_position=integer(config, "max_position_embeddings"),
        norm="layer",
        activation=hf_activation(config, "relu", key="activation_function"),
        gated_mlp=False,
        learned_positions=True,
        rope_fraction=0.0,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tied_head=hf_tied(config),
    )


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The config.json of an `OPTForCausalLM` of this shape."""
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_size,
        "word_embed_proj_dim": config.embed_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "ffn_dim": config.mlp_size,
        "max_position_embeddings": config.max_position,
        "activation_function": config.activation,
        "tie_word_embeddings": config.tied_head,
    }


FAMILY = Family(
    model_type="opt",
    config_from_hf=config_from_hf,
    hf_weights={
        "embed": "model.decoder.embed_tokens",
        "positions": Part(
            "model.decoder.embed_positions",
            lambda config: np.arange(_FIRST, _FIRST + config.max_position),
            lambda config: _FIRST + config.max_position,
        ),
        "blocks.{}.attention_norm": "model.decoder.layers.{}.self_attn_layer_norm",
        "blocks.{}.attention.query": "model.decoder.layers.{}.self_attn.q_proj",
        "blocks.{}.attention.key": "model.decoder.layers.{}.self_attn.k_proj",
        "blocks.{}.attention.value": "model.decoder.layers.{}.self_attn.v_proj",
        "blocks.{}.attention.output": "model.decoder.layers.{}.self_attn.out_proj",
        "blocks.{}.mlp_norm": "model.decoder.layers.{}.final_layer_norm",
        "blocks.{}.mlp.up": "model.decoder.layers.{}.fc1",
        "blocks.{}.mlp.down": "model.decoder.layers.{}.fc2",
        "final_norm": "model.decoder.final_layer_norm",
        "head": "lm_head",
    },
    config_to_hf=config_to_hf,
    prefix="model.",
)
