"""Gemma, the first version (arXiv 2403.08295): scaled embeddings, GELU, norms minus one."""

import math
from typing import Any

from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import (
    Config,
    Family,
    Part,
    TensorStore,
    activation_to_hf,
    get,
    hf_activation,
    hf_rope,
    require,
    rope_to_hf,
)
from spec_jax.models.llama import GGUF_WEIGHTS, HF_WEIGHTS, gguf_shape, hf_shape, shape_to_hf


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `GemmaForCausalLM`."""
    require(config, "attention_bias", False, default=False)
    shape = hf_shape({"head_dim": 256, "tie_word_embeddings": True, **config, "hidden_act": None})
    # Old files say hidden_act, "gelu", and mean the approximation all the same.
    named = {"hidden_activation": get(config, "hidden_activation", "gelu_pytorch_tanh")}
    shape["activation"] = hf_activation(named, "gelu_pytorch_tanh", key="hidden_activation")
    return TransformerConfig(
        **shape, **hf_rope(config), embedding_scale=math.sqrt(shape["embed_size"])
    )


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The config.json of a `GemmaForCausalLM` of this shape."""
    return {
        **shape_to_hf(config),
        **rope_to_hf(config),
        "architectures": ["GemmaForCausalLM"],
        "model_type": "gemma",
        "hidden_act": activation_to_hf(config),
        "hidden_activation": activation_to_hf(config),
    }


def config_from_gguf(metadata: Config, tensors: TensorStore) -> TransformerConfig:
    """Translates the metadata of a GGUF file of architecture `gemma`."""
    shape = gguf_shape(metadata, tensors, "gemma")
    return TransformerConfig(
        **shape, activation="gelu_tanh", embedding_scale=math.sqrt(shape["embed_size"])
    )


def plus_one(name: str) -> Part:
    """A norm whose weight is stored minus one."""
    return Part(name, minus_one=True)


FAMILY = Family(
    model_type="gemma",
    config_from_hf=config_from_hf,
    hf_weights={
        **HF_WEIGHTS,
        "blocks.{}.attention_norm": plus_one("model.layers.{}.input_layernorm"),
        "blocks.{}.mlp_norm": plus_one("model.layers.{}.post_attention_layernorm"),
        "final_norm": plus_one("model.norm"),
    },
    config_to_hf=config_to_hf,
    gguf_architecture="gemma",
    config_from_gguf=config_from_gguf,
    gguf_weights=GGUF_WEIGHTS,
)
