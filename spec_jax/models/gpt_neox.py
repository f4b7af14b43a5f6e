"""GPT-NeoX and Pythia (arXiv 2204.06745, 2304.01373): layer norms, partial rotation, fused QKV."""

from typing import Any

from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import (
    Config,
    Family,
    TensorStore,
    get,
    grouped,
    in_qkv,
    number,
    read_fields,
    write_fields,
)
from spec_jax.models.gguf_metadata import FUSED_QKV, GGUF_WEIGHTS, gguf_shape
from spec_jax.models.hf_rope import hf_rope, rope_to_hf
from spec_jax.models.llama import ATTENTION_BIAS, HF_NAMES

_NAMES = {
    **{field: key for field, key in HF_NAMES.items() if field not in ("num_kv_heads", "head_dim")},
    **ATTENTION_BIAS,
    "norm_eps": "layer_norm_eps",
    "parallel_residual": "use_parallel_residual",
}
_DEFAULTS: dict[str, Any] = {
    "norm_eps": 1e-5,
    "activation": "gelu",
    **dict.fromkeys(("qkv_bias", "output_bias", "parallel_residual"), True),
}


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `GPTNeoXForCausalLM`."""
    theta, fraction = (
        number(config, key, default)
        for key, default in (("rotary_emb_base", 10000.0), ("rotary_pct", 0.25))
    )
    return TransformerConfig.of(
        **read_fields(config, _NAMES, **_DEFAULTS),
        **hf_rope(config, theta=theta, fraction=fraction),
        norm="layer",
        gated_mlp=False,
        mlp_bias=True,
    )


def fields_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The inverse of `config_from_hf`."""
    return {
        **write_fields(config, _NAMES),
        "rotary_pct": config.rotated.fraction,
        "partial_rotary_factor": config.rotated.fraction,
        "rotary_emb_base": config.rotated.theta,
        **rope_to_hf(config),
    }


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
    hf_class="GPTNeoXForCausalLM",
    config_from_hf=config_from_hf,
    fields_to_hf=fields_to_hf,
    hf_weights={
        "embed": "gpt_neox.embed_in",
        "blocks.{}.attention_norm": "gpt_neox.layers.{}.input_layernorm",
        **in_qkv(grouped("gpt_neox.layers.{}.attention.query_key_value")),
        "blocks.{}.attention.output": "gpt_neox.layers.{}.attention.dense",
        "blocks.{}.mlp_norm": "gpt_neox.layers.{}.post_attention_layernorm",
        "blocks.{}.mlp.up": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
        "blocks.{}.mlp.down": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
        "final_norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
    },
    gguf_architecture="gptneox",
    config_from_gguf=config_from_gguf,
    gguf_weights={**GGUF_WEIGHTS, **FUSED_QKV},
    buffers=("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias"),
)
