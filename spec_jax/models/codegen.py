"""CodeGen (arXiv 2203.13474): GPT-J's parallel block with one norm, sharded projections."""

from typing import Any

import numpy as np

from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import Config, Family, Part, halves, integer, read_fields, write_fields
from spec_jax.models.gpt2 import HF_NAMES

_SHARDS = 4
"""Parts of the fused projection, one for each core of the TPUs that it was trained on."""


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `CodeGenForCausalLM`."""
    defaults = {"mlp_size": 4 * integer(config, "n_embd"), "activation": "gelu_new"}
    shape = read_fields(config, HF_NAMES, norm_eps=1e-5, **defaults)
    return TransformerConfig.of(
        **shape,
        norm="layer",
        gated_mlp=False,
        rope_fraction=integer(config, "rotary_dim", shape["head_dim"]) / shape["head_dim"],
        mlp_bias=True,
        parallel_residual=True,
        shared_norm=True,
        head_bias=True,
    )


def fields_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The inverse of `config_from_hf`."""
    return {
        **write_fields(config, HF_NAMES),
        "n_ctx": config.max_position,
        "rotary_dim": config.rotated.size(config.head_dim),
    }


def _fused(which: int, *, rotated: bool) -> Part:
    """Query (0), value (1) or key (2) of each shard; GPT-J rotates neighbouring features."""

    def total(config: TransformerConfig) -> int:
        return 3 * config.num_heads * config.head_dim

    def rows(config: TransformerConfig) -> np.ndarray:
        stored = np.arange(total(config)).reshape(_SHARDS, 3, -1)[:, which].ravel()
        rotary_size = config.rotated.size(config.head_dim) if rotated else 0
        return stored[halves(config.num_heads, config.head_dim, rotary_size)]

    return Part("transformer.h.{}.attn.qkv_proj", rows, total)


FAMILY = Family(
    model_type="codegen",
    hf_class="CodeGenForCausalLM",
    config_from_hf=config_from_hf,
    fields_to_hf=fields_to_hf,
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
    buffers=(".attn.bias", ".attn.causal_mask", ".attn.masked_bias"),
)
