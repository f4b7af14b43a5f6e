"""CodeGen (arXiv 2203.13474): GPT-J's parallel block with one norm, sharded projections."""

from typing import Any

import numpy as np

from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import (
    Config,
    Family,
    Part,
    activation_to_hf,
    get,
    halves,
    hf_activation,
    integer,
    number,
)

_SHARDS = 4
"""Parts of the fused projection, one for each core of the TPUs that it was trained on."""


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `CodeGenForCausalLM`."""
    embed_size, num_heads = integer(config, "n_embd"), integer(config, "n_head")
    head_dim = embed_size // num_heads
    return TransformerConfig.of(
        vocab_size=integer(config, "vocab_size"),
        embed_size=embed_size,
        num_layers=integer(config, "n_layer"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        mlp_size=integer(config, "n_inner", 4 * embed_size),
        max_position=integer(config, "n_positions"),
        norm="layer",
        norm_eps=number(config, "layer_norm_epsilon", 1e-5),
        activation=hf_activation(config, "gelu_new", key="activation_function"),
        gated_mlp=False,
        rope_fraction=integer(config, "rotary_dim", head_dim) / head_dim,
        mlp_bias=True,
        parallel_residual=True,
        shared_norm=True,
        tied_head=bool(get(config, "tie_word_embeddings", False)),
        head_bias=True,
    )


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The config.json of a `CodeGenForCausalLM` of this shape."""
    return {
        "architectures": ["CodeGenForCausalLM"],
        "model_type": "codegen",
        "vocab_size": config.vocab_size,
        "n_embd": config.embed_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.mlp_size,
        "n_positions": config.max_position,
        "n_ctx": config.max_position,
        "rotary_dim": config.rotated.size(config.head_dim),
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": activation_to_hf(config),
        "tie_word_embeddings": config.tied_head,
    }


def _fused(which: int, *, rotated: bool) -> Part:
    """Query (0), value (1) or key (2) of each shard; GPT-J rotates neighbouring features."""

    def total(config: TransformerConfig) -> int:
        return 3 * config.num_heads * config.head_dim

    def rows(config: TransformerConfig) -> np.ndarray:
        found = np.arange(total(config)).reshape(_SHARDS, 3, -1)[:, which].ravel()
        if not rotated:
            return found
        return found[
            halves(config.num_heads, config.head_dim, config.rotated.size(config.head_dim))
        ]

    return Part("transformer.h.{}.attn.qkv_proj", rows, total)


FAMILY = Family(
    model_type="codegen",
    config_from_hf=config_from_hf,
    hf_weights={
        "embed": "transformer.wte",
        "blocks.{}.attention_norm": "transformer.h.{}.ln_1",
        "blocks.{}.attention.query": _fused(0, rotated=True),
        "blocks.{}.attention.value": _fused(1, rotated=False),
        "blocks.{}.attention.key": _fused(2, rotated=True),
        "blocks.{}.attention.output": "transformer.h.{}.attn.out_proj",
        "blocks.{}.mlp.up": "transformer.h.{}.mlp.fc_in",
        "blocks.{}.mlp.down": "transformer.h.{}.mlp.fc_out",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
    config_to_hf=config_to_hf,
    buffers=(".attn.bias", ".attn.causal_mask", ".attn.masked_bias"),
)
