"""Gemma, the first version (arXiv 2403.08295): scaled embeddings, GELU, norms minus one."""

import math
from typing import Any

from spec_jax.errors import CheckpointError
from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import (
    Config,
    Family,
    Part,
    TensorStore,
    WeightTable,
    activation_to_hf,
    get,
    integer,
    read_fields,
    require,
    write_fields,
)
from spec_jax.models.gguf_metadata import GGUF_WEIGHTS, gguf_shape
from spec_jax.models.hf_rope import hf_rope, rope_to_hf
from spec_jax.models.llama import HF_NAMES, HF_WEIGHTS

_NAMES = {**HF_NAMES, "activation": "hidden_activation"}


def hf_shape(config: Config) -> dict[str, Any]:
    """Arguments of `TransformerConfig.of` that all versions store in the same way."""
    require(config, "attention_bias", False, default=False)
    require(config, "partial_rotary_factor", 1.0, default=1.0)
    # Old files name "gelu" as hidden_act, but use the approximation.
    config = {"head_dim": 256, "tie_word_embeddings": True, **config}
    shape = read_fields(config, _NAMES, norm_eps=1e-6, activation="gelu_pytorch_tanh")
    return {**shape, "embedding_scale": math.sqrt(shape["embed_size"])}


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `GemmaForCausalLM`."""
    require(config, "use_bidirectional_attention", False, default=False)
    return TransformerConfig.of(**hf_shape(config), **hf_rope(config))


def fields_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The inverse of `config_from_hf`."""
    names = {**write_fields(config, _NAMES), "hidden_act": activation_to_hf(config)}
    return {**names, **rope_to_hf(config)}


def windows_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The scores and windows of Gemma 2 and 3."""
    return {
        "query_pre_attn_scalar": int(config.query_pre_attn_scalar or config.head_dim),
        "sliding_window": config.sliding_window,
        "layer_types": [
            "sliding_attention" if layer.window else "full_attention" for layer in config.layers
        ],
    }


def gguf_fields(
    metadata: Config, tensors: TensorStore, architecture: str, widest: int
) -> dict[str, Any]:
    """The shape of Gemma 2 and 3; `widest` is the number of layers of the 27B model."""
    shape = gguf_shape(metadata, tensors, architecture)
    # Only the 27B model scales its scores by another width than the head's.
    is_widest = shape["num_layers"] == widest
    scalar = shape["embed_size"] // shape["num_heads"] if is_widest else shape["head_dim"]
    return {
        **shape,
        "activation": "gelu_tanh",
        "embedding_scale": math.sqrt(shape["embed_size"]),
        "post_norms": True,
        "query_pre_attn_scalar": float(scalar),
    }


def config_from_gguf(metadata: Config, tensors: TensorStore) -> TransformerConfig:
    """Translates the metadata of a GGUF file of architecture `gemma`."""
    shape = gguf_shape(metadata, tensors, "gemma")
    scale = math.sqrt(shape["embed_size"])
    return TransformerConfig.of(**shape, activation="gelu_tanh", embedding_scale=scale)


def global_every(config: Config, num_layers: int, default: int) -> int:
    """Every how many layers one is global; newer configs list the kinds of all layers."""
    kinds = get(config, "layer_types", ())
    if not kinds:
        return integer(config, "sliding_window_pattern", default)
    every = kinds.index("full_attention") + 1 if "full_attention" in kinds else num_layers + 1
    expected = [
        "sliding_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)
    ]
    if list(kinds) != expected:
        raise CheckpointError(
            f"the checkpoint's config has layer_types = {list(kinds)!r}; supported: one for each "
            "layer, and full_attention at regular intervals."
        )
    return every


def plus_one(name: str) -> Part:
    """A norm whose weight is stored minus one."""
    return Part(name, minus_one=True)


HF_NORMS: WeightTable = {
    "blocks.{}.attention_norm": plus_one("model.layers.{}.input_layernorm"),
    "blocks.{}.attention_post_norm": plus_one("model.layers.{}.post_attention_layernorm"),
    "blocks.{}.mlp_norm": plus_one("model.layers.{}.pre_feedforward_layernorm"),
    "blocks.{}.mlp_post_norm": plus_one("model.layers.{}.post_feedforward_layernorm"),
    "final_norm": plus_one("model.norm"),
}
"""Norms of Gemma 2 and 3, on both sides of attention and MLP."""

GGUF_NORMS: WeightTable = {
    "blocks.{}.attention_post_norm": "blk.{}.post_attention_norm",
    "blocks.{}.mlp_post_norm": "blk.{}.post_ffw_norm",
}
"""Norms that other families lack; GGUF stores the weights themselves."""

FAMILY = Family(
    model_type="gemma",
    hf_class="GemmaForCausalLM",
    config_from_hf=config_from_hf,
    fields_to_hf=fields_to_hf,
    hf_weights={
        **HF_WEIGHTS,
        "blocks.{}.attention_norm": plus_one("model.layers.{}.input_layernorm"),
        "blocks.{}.mlp_norm": plus_one("model.layers.{}.post_attention_layernorm"),
        "final_norm": plus_one("model.norm"),
    },
    gguf_architecture="gemma",
    config_from_gguf=config_from_gguf,
    gguf_weights=GGUF_WEIGHTS,
)
