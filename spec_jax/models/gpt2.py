"""GPT-2 and DistilGPT-2 (Radford et al. 2019): learned positions, matrices stored [in, out]."""

from typing import Any

from spec_jax.models import gguf_metadata
from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import (
    Config,
    Family,
    Part,
    WeightTable,
    fused,
    in_qkv,
    integer,
    qkv_sizes,
    read_fields,
    require,
    write_fields,
)
from spec_jax.models.gguf_metadata import FUSED_QKV, gguf_config

HF_NAMES = {
    "vocab_size": "vocab_size",
    "embed_size": "n_embd",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "mlp_size": "n_inner",
    "max_position": "n_positions",
    "norm_eps": "layer_norm_epsilon",
    "activation": "activation_function",
    "tied_head": "tie_word_embeddings",
}
BIASED: dict[str, Any] = {
    "norm": "layer",
    "gated_mlp": False,
    "qkv_bias": True,
    "output_bias": True,
    "mlp_bias": True,
}
"""Layer norms, an MLP of two matrices, biases everywhere."""
LEARNED: dict[str, Any] = {"learned_positions": True, "rope_fraction": 0.0}
"""A table of positions instead of a rotation."""


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `GPT2LMHeadModel`."""
    require(config, "scale_attn_by_inverse_layer_idx", False, default=False)
    require(config, "add_cross_attention", False, default=False)
    return TransformerConfig.of(**hf_shape(config), **BIASED, **LEARNED)


def hf_shape(config: Config) -> dict[str, Any]:
    """Arguments of `TransformerConfig.of` that GPT-2 and GPT-BigCode store in the same way."""
    require(config, "scale_attn_weights", True, default=True)
    mlp_size = 4 * integer(config, "n_embd")
    defaults = {"mlp_size": mlp_size, "norm_eps": 1e-5, "activation": "gelu_new", "tied_head": True}
    return read_fields(config, HF_NAMES, **defaults)


HF_WEIGHTS: WeightTable = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "blocks.{}.attention_norm": "transformer.h.{}.ln_1",
    **in_qkv(lambda which: fused("transformer.h.{}.attn.c_attn", qkv_sizes, which, turned=True)),
    "blocks.{}.attention.output": Part("transformer.h.{}.attn.c_proj", turned=True),
    "blocks.{}.mlp_norm": "transformer.h.{}.ln_2",
    "blocks.{}.mlp.up": Part("transformer.h.{}.mlp.c_fc", turned=True),
    "blocks.{}.mlp.down": Part("transformer.h.{}.mlp.c_proj", turned=True),
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
}

GGUF_FIELDS: dict[str, Any] = {"activation": "gelu_tanh", "gated_mlp": False, **LEARNED}
GGUF_WEIGHTS: WeightTable = {
    **gguf_metadata.GGUF_WEIGHTS,
    **FUSED_QKV,
    "positions": "position_embd",
}

FAMILY = Family(
    model_type="gpt2",
    hf_class="GPT2LMHeadModel",
    config_from_hf=config_from_hf,
    fields_to_hf=lambda config: write_fields(config, HF_NAMES),
    hf_weights=HF_WEIGHTS,
    gguf_architecture="gpt2",
    config_from_gguf=gguf_config("gpt2", norm="layer", **GGUF_FIELDS),
    gguf_weights=GGUF_WEIGHTS,
    buffers=(".attn.bias", ".attn.masked_bias"),
    prefix="transformer.",
)
