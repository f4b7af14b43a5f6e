"""GPT-BigCode, such as SantaCoder and StarCoder (arXiv 2305.06161): GPT-2 with one KV head."""

from typing import Any

from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import Config, Family, get, grouped, in_qkv, write_fields
from spec_jax.models.gguf_metadata import gguf_config
from spec_jax.models.gpt2 import (
    BIASED,
    GGUF_FIELDS,
    GGUF_WEIGHTS,
    HF_NAMES,
    HF_WEIGHTS,
    LEARNED,
    hf_shape,
)


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `GPTBigCodeForCausalLM`."""
    shape = hf_shape({"activation_function": "gelu_pytorch_tanh", **config})
    if get(config, "multi_query", True):
        shape["num_kv_heads"] = 1
    return TransformerConfig.of(**shape, **BIASED, **LEARNED)


def fields_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The inverse of `config_from_hf`."""
    return {**write_fields(config, HF_NAMES), "multi_query": config.num_kv_heads == 1}


FAMILY = Family(
    model_type="gpt_bigcode",
    hf_class="GPTBigCodeForCausalLM",
    config_from_hf=config_from_hf,
    fields_to_hf=fields_to_hf,
    hf_weights={
        **HF_WEIGHTS,
        **in_qkv(grouped("transformer.h.{}.attn.c_attn")),
        "blocks.{}.attention.output": "transformer.h.{}.attn.c_proj",
        "blocks.{}.mlp.up": "transformer.h.{}.mlp.c_fc",
        "blocks.{}.mlp.down": "transformer.h.{}.mlp.c_proj",
    },
    gguf_architecture="starcoder",
    config_from_gguf=gguf_config("starcoder", norm="layer", **GGUF_FIELDS),
    gguf_weights=GGUF_WEIGHTS,
    buffers=(".attn.bias", ".attn.masked_bias"),
    prefix="transformer.",
)
