"""GPT-2 and DistilGPT-2 (Radford et al. 2019): learned positions, matrices stored [in, out]."""

from typing import Any

from spec_jax.models import gguf_metadata
from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import (
    Config,
    Family,
    Part,
    TensorStore,
    WeightTable,
    activation_to_hf,
    fused,
    get,
    hf_activation,
    integer,
    number,
    qkv_sizes,
    require,
)
from spec_jax.models.gguf_metadata import FUSED_QKV, gguf_shape


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `GPT2LMHeadModel`."""
    require(config, "scale_attn_by_inverse_layer_idx", False, default=False)
    require(config, "add_cross_attention", False, default=False)
    return TransformerConfig.of(**hf_shape(config), tied_head=hf_tied(config))


def hf_shape(config: Config) -> dict[str, Any]:
    """What GPT-2 and GPT-BigCode say in the same words."""
    require(config, "scale_attn_weights", True, default=True)
    embed_size, num_heads = integer(config, "n_embd"), integer(config, "n_head")
    return {
        "vocab_size": integer(config, "vocab_size"),
        "embed_size": embed_size,
        "num_layers": integer(config, "n_layer"),
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": embed_size // num_heads,
        "mlp_size": integer(config, "n_inner", 4 * embed_size),
        "max_position": integer(config, "n_positions"),
        "norm": "layer",
        "norm_eps": number(config, "layer_norm_epsilon", 1e-5),
        "activation": hf_activation(config, "gelu_new", key="activation_function"),
        "gated_mlp": False,
        "learned_positions": True,
        "rope_fraction": 0.0,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
    }


def hf_tied(config: Config) -> bool:
    """Whether the head is tied, which older families are unless they say otherwise."""
    return bool(get(config, "tie_word_embeddings", True))


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The config.json of a `GPT2LMHeadModel` of this shape."""
    return {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **shape_to_hf(config)}


def shape_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """What `hf_shape` and `hf_tied` read."""
    return {
        "vocab_size": config.vocab_size,
        "n_embd": config.embed_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.mlp_size,
        "n_positions": config.max_position,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": activation_to_hf(config),
        "tie_word_embeddings": config.tied_head,
    }


_QKV = "transformer.h.{}.attn.c_attn"

HF_WEIGHTS: WeightTable = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "blocks.{}.attention_norm": "transformer.h.{}.ln_1",
    "blocks.{}.attention.query": fused(_QKV, qkv_sizes, 0, turned=True),
    "blocks.{}.attention.key": fused(_QKV, qkv_sizes, 1, turned=True),
    "blocks.{}.attention.value": fused(_QKV, qkv_sizes, 2, turned=True),
    "blocks.{}.attention.output": Part("transformer.h.{}.attn.c_proj", turned=True),
    "blocks.{}.mlp_norm": "transformer.h.{}.ln_2",
    "blocks.{}.mlp.up": Part("transformer.h.{}.mlp.c_fc", turned=True),
    "blocks.{}.mlp.down": Part("transformer.h.{}.mlp.c_proj", turned=True),
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
}


def config_from_gguf(metadata: Config, tensors: TensorStore) -> TransformerConfig:
    """Translates the metadata of a GGUF file of architecture `gpt2`."""
    return TransformerConfig.of(**gguf_shape_of(metadata, tensors, "gpt2"))


def gguf_shape_of(metadata: Config, tensors: TensorStore, architecture: str) -> dict[str, Any]:
    """What GPT-2 and GPT-BigCode have in common."""
    return gguf_shape(metadata, tensors, architecture, norm="layer") | {
        "activation": "gelu_tanh",
        "gated_mlp": False,
        "learned_positions": True,
        "rope_fraction": 0.0,
    }


GGUF_WEIGHTS: WeightTable = {
    **gguf_metadata.GGUF_WEIGHTS,
    **FUSED_QKV,
    "positions": "position_embd",
}


FAMILY = Family(
    model_type="gpt2",
    config_from_hf=config_from_hf,
    hf_weights=HF_WEIGHTS,
    config_to_hf=config_to_hf,
    gguf_architecture="gpt2",
    config_from_gguf=config_from_gguf,
    gguf_weights=GGUF_WEIGHTS,
    buffers=(".attn.bias", ".attn.masked_bias"),
    prefix="transformer.",
)
