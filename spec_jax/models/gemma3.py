"""Gemma 3, text only (arXiv 2503.19786): windows in five layers of six, norms on both sides."""

import math
from collections.abc import Mapping
from typing import Any

from spec_jax.errors import CheckpointError
from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import (
    Config,
    Family,
    TensorStore,
    activation_to_hf,
    hf_activation,
    integer,
    number,
    require,
)
from spec_jax.models.gemma import GGUF_NORMS, HF_NORMS, global_every, plus_one
from spec_jax.models.gguf_metadata import GGUF_WEIGHTS, QK_NORMS, gguf_shape
from spec_jax.models.hf_rope import hf_rope, rope_to_hf
from spec_jax.models.llama import HF_WEIGHTS, hf_shape, shape_to_hf

_GLOBAL_EVERY = 6
_ROPE_THETA, _LOCAL_ROPE_THETA = 1e6, 1e4
_LAYERS_OF_27B = 62

_ALWAYS: Mapping[str, Any] = {"qk_norm": "head", "post_norms": True}


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `Gemma3ForCausalLM`."""
    require(config, "attention_bias", False, default=False)
    require(config, "attn_logit_softcapping", None, default=None)
    require(config, "final_logit_softcapping", None, default=None)
    require(config, "use_bidirectional_attention", False, default=False)
    shape = hf_shape({"head_dim": 256, "tie_word_embeddings": True, **config, "hidden_act": None})
    shape["activation"] = hf_activation(config, "gelu_pytorch_tanh", key="hidden_activation")
    return TransformerConfig.of(
        **shape,
        **_hf_rope(config),
        **_ALWAYS,
        embedding_scale=math.sqrt(shape["embed_size"]),
        query_pre_attn_scalar=number(config, "query_pre_attn_scalar", 256.0),
        sliding_window=integer(config, "sliding_window", 4096),
        global_every=global_every(config, shape["num_layers"], _GLOBAL_EVERY),
    )


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The config.json of a `Gemma3ForCausalLM` of this shape."""
    of_global = rope_to_hf(config)["rope_parameters"]
    local = next((layer.rotary for layer in config.kinds if layer.window), None)
    of_local = {"rope_type": "default", "rope_theta": local and local.theta}
    shape = shape_to_hf(config)
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **shape,
        "hidden_activation": activation_to_hf(config),
        "query_pre_attn_scalar": int(config.query_pre_attn_scalar or config.head_dim),
        "sliding_window": config.sliding_window,
        "layer_types": [
            "sliding_attention" if layer.window else "full_attention" for layer in config.layers
        ],
        "rope_parameters": {"full_attention": of_global, "sliding_attention": of_local},
    }


def _hf_rope(config: Config) -> dict[str, Any]:
    """Rotary settings of both kinds of layers: transformers 5 nests them, 4 names them apart."""
    own = config.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in own.values()):
        of_global, of_local = (
            hf_rope({"rope_parameters": own.get(f"{kind}_attention")}, theta=theta)
            for kind, theta in (("full", _ROPE_THETA), ("sliding", _LOCAL_ROPE_THETA))
        )
        if (of_local["rope_factor"], of_local["rope_scaling"]) != (1.0, None):
            raise CheckpointError(
                f"the checkpoint's config has rope_parameters = {own!r}; the positions of "
                "sliding_attention layers must not be scaled."
            )
        return {**of_global, "local_rope_theta": of_local["rope_theta"]}
    local_theta = number(config, "rope_local_base_freq", _LOCAL_ROPE_THETA)
    return {**hf_rope(config, theta=_ROPE_THETA), "local_rope_theta": local_theta}


def config_from_gguf(metadata: Config, tensors: TensorStore) -> TransformerConfig:
    """Translates the metadata of a GGUF file of architecture `gemma3`.

    Missing metadata have the same defaults as in llama.cpp.
    """
    require(metadata, "gemma3.final_logit_softcapping", 0.0, default=0.0)
    shape = gguf_shape(metadata, tensors, "gemma3")
    shape["sliding_window"] = integer(metadata, "gemma3.attention.sliding_window")
    shape["rope_theta"] = number(metadata, "gemma3.rope.freq_base", _ROPE_THETA)
    # Only the 27B model scales its scores by something else than its head's width.
    widest = shape["num_layers"] == _LAYERS_OF_27B
    scalar = shape["embed_size"] // shape["num_heads"] if widest else shape["head_dim"]
    return TransformerConfig.of(
        **shape,
        **_ALWAYS,
        embedding_scale=math.sqrt(shape["embed_size"]),
        activation="gelu_tanh",
        query_pre_attn_scalar=float(scalar),
        global_every=integer(metadata, "gemma3.attention.sliding_window_pattern", _GLOBAL_EVERY),
        local_rope_theta=number(metadata, "gemma3.rope.freq_base_swa", _LOCAL_ROPE_THETA),
    )


FAMILY = Family(
    model_type="gemma3_text",
    config_from_hf=config_from_hf,
    hf_weights={
        **HF_WEIGHTS,
        **HF_NORMS,
        "blocks.{}.attention.query_norm": plus_one("model.layers.{}.self_attn.q_norm"),
        "blocks.{}.attention.key_norm": plus_one("model.layers.{}.self_attn.k_norm"),
    },
    config_to_hf=config_to_hf,
    gguf_architecture="gemma3",
    config_from_gguf=config_from_gguf,
    gguf_weights={**GGUF_WEIGHTS, **QK_NORMS, **GGUF_NORMS},
)
