"""Falcon (arXiv 2311.16867): a parallel block of one norm or two, or a sequential one, ALiBi."""

from typing import Any

from spec_jax.models.bloom import grouped
from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import (
    Config,
    Family,
    TensorStore,
    WeightTable,
    activation_to_hf,
    get,
    hf_activation,
    integer,
    number,
    require,
)
from spec_jax.models.gguf_metadata import FUSED_QKV, GGUF_WEIGHTS, gguf_shape
from spec_jax.models.gpt2 import hf_tied
from spec_jax.models.hf_rope import hf_rope, rope_to_hf


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `FalconForCausalLM`."""
    embed_size, num_heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    new = bool(get(config, "new_decoder_architecture", False))
    parallel = new or bool(get(config, "parallel_attn", True))
    norms = integer(config, "num_ln_in_parallel_attn", 2 if new else 1)
    if new:
        num_kv_heads = integer(config, "num_kv_heads", num_heads)
    else:
        num_kv_heads = 1 if get(config, "multi_query", True) else num_heads
    head_dim, bias = embed_size // num_heads, bool(get(config, "bias", False))
    alibi, rope = bool(get(config, "alibi", False)), hf_rope(config)
    if alibi:
        rope["rope_fraction"] = 0.0
    return TransformerConfig.of(
        vocab_size=integer(config, "vocab_size"),
        embed_size=embed_size,
        num_layers=integer(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mlp_size=integer(config, "ffn_hidden_size", 4 * embed_size),
        max_position=integer(config, "max_position_embeddings", 2048),
        norm="layer",
        norm_eps=number(config, "layer_norm_epsilon", 1e-5),
        activation=hf_activation(config, "gelu", key="activation"),
        gated_mlp=False,
        **rope,
        # The distance is subtracted before the scores are scaled.
        alibi_scale=head_dim**-0.5 if alibi else 0.0,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        parallel_residual=parallel,
        shared_norm=parallel and not (new and norms == 2),
        tied_head=hf_tied(config),
    )


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The config.json of a `FalconForCausalLM` of this shape."""
    two_norms = config.parallel_residual and not config.shared_norm
    new = two_norms or config.num_kv_heads not in (1, config.num_heads)
    return {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "new_decoder_architecture": new,
        "num_ln_in_parallel_attn": 2 if two_norms else 1,
        "parallel_attn": config.parallel_residual,
        "multi_query": config.num_kv_heads == 1,
        "ffn_hidden_size": config.mlp_size,
        "max_position_embeddings": config.max_position,
        "layer_norm_epsilon": config.norm_eps,
        "activation": activation_to_hf(config),
        "alibi": config.alibi_scale > 0,
        "bias": config.mlp_bias,
        "tie_word_embeddings": config.tied_head,
        **rope_to_hf(config),
    }


_QKV = "transformer.h.{}.self_attention.query_key_value"


def hf_weights(config: TransformerConfig) -> WeightTable:
    """Where weights lie: norms have other names where attention and MLP have one each."""
    two_norms = config.parallel_residual and not config.shared_norm
    norms = ("ln_attn", "ln_mlp") if two_norms else ("input_layernorm", "post_attention_layernorm")
    return {
        "embed": "transformer.word_embeddings",
        "blocks.{}.attention_norm": "transformer.h.{}." + norms[0],
        "blocks.{}.attention.query": grouped(_QKV, 0),
        "blocks.{}.attention.key": grouped(_QKV, 1),
        "blocks.{}.attention.value": grouped(_QKV, 2),
        "blocks.{}.attention.output": "transformer.h.{}.self_attention.dense",
        "blocks.{}.mlp_norm": "transformer.h.{}." + norms[1],
        "blocks.{}.mlp.up": "transformer.h.{}.mlp.dense_h_to_4h",
        "blocks.{}.mlp.down": "transformer.h.{}.mlp.dense_4h_to_h",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    }


def config_from_gguf(metadata: Config, tensors: TensorStore) -> TransformerConfig:
    """Translates the metadata of a GGUF file of architecture `falcon`, whose block is parallel."""
    require(metadata, "falcon.tensor_data_layout", "jploski", default="jploski")
    shape = gguf_shape(metadata, tensors, "falcon", norm="layer")
    # Some files count as many key/value heads as config.json of Falcon 7B, which has but one.
    if rows := tensors.shapes.get("blk.0.attn_qkv.weight", ())[:1]:
        shape["num_kv_heads"] = (rows[0] // shape["head_dim"] - shape["num_heads"]) // 2
    return TransformerConfig.of(
        **shape,
        activation="gelu",
        gated_mlp=False,
        parallel_residual=True,
        shared_norm="blk.0.attn_norm_2.weight" not in tensors.shapes,
    )


def gguf_weights(config: TransformerConfig) -> WeightTable:
    """Where weights lie in GGUF files: of two norms the second is the attention's."""
    norms: WeightTable = {}
    if not config.shared_norm:
        norms = {
            "blocks.{}.attention_norm": "blk.{}.attn_norm_2",
            "blocks.{}.mlp_norm": "blk.{}.attn_norm",
        }
    return {**GGUF_WEIGHTS, **FUSED_QKV, **norms}


FAMILY = Family(
    model_type="falcon",
    config_from_hf=config_from_hf,
    hf_weights=hf_weights,
    config_to_hf=config_to_hf,
    gguf_architecture="falcon",
    config_from_gguf=config_from_gguf,
    gguf_weights=gguf_weights,
    prefix="transformer.",
)
