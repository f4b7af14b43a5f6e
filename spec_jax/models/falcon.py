"""Falcon (arXiv 2311.16867): a parallel block of one norm or two, or a sequential one, ALiBi."""

from typing import Any

from spec_jax.models import bloom
from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import (
    Config,
    Family,
    TensorStore,
    WeightTable,
    get,
    integer,
    read_fields,
    require,
    write_fields,
)
from spec_jax.models.gguf_metadata import FUSED_QKV, GGUF_WEIGHTS, gguf_shape
from spec_jax.models.hf_rope import hf_rope, rope_to_hf

_NAMES = {
    "vocab_size": "vocab_size",
    "embed_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "mlp_size": "ffn_hidden_size",
    "max_position": "max_position_embeddings",
    "norm_eps": "layer_norm_epsilon",
    "activation": "activation",
    "tied_head": "tie_word_embeddings",
    **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), "bias"),
}


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `FalconForCausalLM`."""
    new = bool(get(config, "new_decoder_architecture", False))
    parallel = new or bool(get(config, "parallel_attn", True))
    norms = integer(config, "num_ln_in_parallel_attn", 2 if new else 1)
    shape = read_fields(
        config,
        _NAMES,
        mlp_size=4 * integer(config, "hidden_size"),
        max_position=2048,
        norm_eps=1e-5,
        activation="gelu",
        tied_head=True,
    )
    if new:
        shape["num_kv_heads"] = integer(config, "num_kv_heads", shape["num_heads"])
    elif get(config, "multi_query", True):
        shape["num_kv_heads"] = 1
    shape |= hf_rope(config)
    if get(config, "alibi", False):
        # The distance is subtracted before the scores are scaled.
        shape |= {"rope_fraction": 0.0, "alibi_scale": shape["head_dim"] ** -0.5}
    return TransformerConfig.of(
        **shape,
        norm="layer",
        gated_mlp=False,
        parallel_residual=parallel,
        shared_norm=parallel and not (new and norms == 2),
    )


def _has_two_norms(config: TransformerConfig) -> bool:
    return config.parallel_residual and not config.shared_norm


def fields_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The inverse of `config_from_hf`."""
    two_norms = _has_two_norms(config)
    return {
        **write_fields(config, {**_NAMES, "num_kv_heads": "num_kv_heads"}),
        **rope_to_hf(config),
        "new_decoder_architecture": two_norms or config.num_kv_heads not in (1, config.num_heads),
        "num_ln_in_parallel_attn": 2 if two_norms else 1,
        "parallel_attn": config.parallel_residual,
        "multi_query": config.num_kv_heads == 1,
        "alibi": config.alibi_scale > 0,
    }


def hf_weights(config: TransformerConfig) -> WeightTable:
    """Where weights lie: norms have other names where attention and MLP have one each."""
    if not _has_two_norms(config):
        return bloom.HF_WEIGHTS
    norms = {
        "blocks.{}.attention_norm": "transformer.h.{}.ln_attn",
        "blocks.{}.mlp_norm": "transformer.h.{}.ln_mlp",
    }
    return {**bloom.HF_WEIGHTS, **norms}


def config_from_gguf(metadata: Config, tensors: TensorStore) -> TransformerConfig:
    """Translates the metadata of a GGUF file of architecture `falcon`, whose block is parallel."""
    require(metadata, "falcon.tensor_data_layout", "jploski", default="jploski")
    shape = gguf_shape(metadata, tensors, "falcon", norm="layer")
    # Some files have the key/value heads of config.json of Falcon 7B, which has only one.
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
    """Where weights lie in GGUF files: the second of two norms belongs to attention."""
    norms: WeightTable = {}
    if not config.shared_norm:
        norms = {
            "blocks.{}.attention_norm": "blk.{}.attn_norm_2",
            "blocks.{}.mlp_norm": "blk.{}.attn_norm",
        }
    return {**GGUF_WEIGHTS, **FUSED_QKV, **norms}


FAMILY = Family(
    model_type="falcon",
    hf_class="FalconForCausalLM",
    config_from_hf=config_from_hf,
    fields_to_hf=fields_to_hf,
    hf_weights=hf_weights,
    gguf_architecture="falcon",
    config_from_gguf=config_from_gguf,
    gguf_weights=gguf_weights,
    prefix="transformer.",
)
