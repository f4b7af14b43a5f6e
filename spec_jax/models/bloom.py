"""BLOOM (arXiv 2211.05100): ALiBi instead of positions, a norm after the embedding."""

from typing import Any

from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import (
    Config,
    Family,
    WeightTable,
    grouped,
    in_qkv,
    read_fields,
    require,
    write_fields,
)
from spec_jax.models.gguf_metadata import FUSED_QKV, GGUF_WEIGHTS, gguf_config
from spec_jax.models.gpt2 import BIASED

_HF_NAMES = {
    "vocab_size": "vocab_size",
    "embed_size": "hidden_size",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "max_position": "seq_length",
    "norm_eps": "layer_norm_epsilon",
    "tied_head": "tie_word_embeddings",
}
_OTHER_NAMES = {
    "hidden_size": "n_embed",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
}
_FIXED: dict[str, Any] = {
    "activation": "gelu_tanh",
    "gated_mlp": False,
    "rope_fraction": 0.0,
    "alibi_scale": 1.0,
    "embedding_norm": True,
}


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `BloomForCausalLM`."""
    require(config, "apply_residual_connection_post_layernorm", False, default=False)
    config = {**{key: config.get(other) for key, other in _OTHER_NAMES.items()}, **config}
    # They were trained for 2048 tokens; config.json seldom says so.
    shape = read_fields(config, _HF_NAMES, max_position=2048, norm_eps=1e-5, tied_head=True)
    shape["mlp_size"] = 4 * shape["embed_size"]
    return TransformerConfig.of(**shape, **BIASED | _FIXED)


HF_WEIGHTS: WeightTable = {
    "embed": "transformer.word_embeddings",
    "embedding_norm": "transformer.word_embeddings_layernorm",
    "blocks.{}.attention_norm": "transformer.h.{}.input_layernorm",
    **in_qkv(grouped("transformer.h.{}.self_attention.query_key_value")),
    "blocks.{}.attention.output": "transformer.h.{}.self_attention.dense",
    "blocks.{}.mlp_norm": "transformer.h.{}.post_attention_layernorm",
    "blocks.{}.mlp.up": "transformer.h.{}.mlp.dense_h_to_4h",
    "blocks.{}.mlp.down": "transformer.h.{}.mlp.dense_4h_to_h",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
}

FAMILY = Family(
    model_type="bloom",
    hf_class="BloomForCausalLM",
    config_from_hf=config_from_hf,
    fields_to_hf=lambda config: write_fields(config, _HF_NAMES),
    hf_weights=HF_WEIGHTS,
    gguf_architecture="bloom",
    config_from_gguf=gguf_config("bloom", norm="layer", **_FIXED),
    gguf_weights={**GGUF_WEIGHTS, **FUSED_QKV, "embedding_norm": "token_embd_norm"},
    prefix="transformer.",
)
