"""GPT-BigCode, such as SantaCoder and StarCoder (arXiv 2305.06161): GPT-2 with one KV head."""

import dataclasses
from typing import Any

import numpy as np

from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import Config, Family, Part, TensorStore, get
from spec_jax.models.gpt2 import (
    GGUF_WEIGHTS,
    HF_WEIGHTS,
    gguf_shape_of,
    hf_shape,
    hf_tied,
    shape_to_hf,
)


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `GPTBigCodeForCausalLM`."""
    shape = hf_shape({"activation_function": "gelu_pytorch_tanh", **config})
    found = TransformerConfig.of(**shape, tied_head=hf_tied(config))
    return dataclasses.replace(found, num_kv_heads=1) if get(config, "multi_query", True) else found


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The config.json of a `GPTBigCodeForCausalLM` of this shape."""
    return {
        "architectures": ["GPTBigCodeForCausalLM"],
        "model_type": "gpt_bigcode",
        **shape_to_hf(config),
        "multi_query": config.num_kv_heads == 1,
    }


def _fused(which: int) -> Part:
    """Query (0), key (1) or value (2): the one key/value head last, or all three by head."""

    def total(config: TransformerConfig) -> int:
        return (config.num_heads + 2 * config.num_kv_heads) * config.head_dim

    def rows(config: TransformerConfig) -> np.ndarray:
        if config.num_kv_heads == 1:
            width, head_dim = config.num_heads * config.head_dim, config.head_dim
            return np.split(np.arange(total(config)), [width, width + head_dim])[which]
        heads = np.arange(total(config)).reshape(config.num_heads, 3, config.head_dim)
        return heads[:, which].ravel()

    return Part("transformer.h.{}.attn.c_attn", rows, total)


def config_from_gguf(metadata: Config, tensors: TensorStore) -> TransformerConfig:
    """Translates the metadata of a GGUF file of architecture `starcoder`."""
    return TransformerConfig.of(**gguf_shape_of(metadata, tensors, "starcoder"))


FAMILY = Family(
    model_type="gpt_bigcode",
    config_from_hf=config_from_hf,
    hf_weights={
        **HF_WEIGHTS,
        "blocks.{}.attention.query": _fused(0),
        "blocks.{}.attention.key": _fused(1),
        "blocks.{}.attention.value": _fused(2),
        "blocks.{}.attention.output": "transformer.h.{}.attn.c_proj",
        "blocks.{}.mlp.up": "transformer.h.{}.mlp.c_fc",
        "blocks.{}.mlp.down": "transformer.h.{}.mlp.c_proj",
    },
    config_to_hf=config_to_hf,
    gguf_architecture="starcoder",
    config_from_gguf=config_from_gguf,
    gguf_weights=GGUF_WEIGHTS,
    buffers=(".attn.bias", ".attn.masked_bias"),
    prefix="transformer.",
)
