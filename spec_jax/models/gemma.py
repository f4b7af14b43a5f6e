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
    hf_activation,
    integer,
    require,
)
from spec_jax.models.gguf_metadata import GGUF_WEIGHTS, gguf_shape
from spec_jax.models.hf_rope import hf_rope, rope_to_hf
from spec_jax.models.llama import HF_WEIGHTS, hf_shape, shape_to_hf


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `GemmaForCausalLM`."""
    require(config, "attention_bias", False, default=False)
    shape = hf_shape({"head_dim": 256, "tie_word_embeddings": True, **config, "hidden_act": None})
    # Old files say hidden_act, "gelu", and mean the approximation all the same.
    named = {"hidden_activation": get(config, "hidden_activation", "gelu_pytorch_tanh")}
    shape["activation"] = hf_activation(named, "gelu_pytorch_tanh", key="hidden_activation")
    return TransformerConfig.of(
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
    return TransformerConfig.of(
        **shape, activation="gelu_tanh", embedding_scale=math.sqrt(shape["embed_size"])
    )


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
"""Those of them that other families lack; GGUF stores the weights themselves."""

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
