"""Gemma 3, text only (arXiv 2503.19786): windows in five layers of six, norms on both sides."""

from collections.abc import Mapping
from typing import Any

from spec_jax.errors import CheckpointError
from spec_jax.models import gemma
from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import Config, Family, TensorStore, integer, number, require
from spec_jax.models.gemma import (
    GGUF_NORMS,
    HF_NORMS,
    gguf_fields,
    global_every,
    plus_one,
    windows_to_hf,
)
from spec_jax.models.gguf_metadata import GGUF_WEIGHTS, QK_NORMS
from spec_jax.models.hf_rope import check_rope_keys, hf_rope, rope_settings
from spec_jax.models.llama import HF_WEIGHTS

_GLOBAL_EVERY = 6
_ROPE_THETA, _LOCAL_ROPE_THETA = 1e6, 1e4


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `Gemma3ForCausalLM`."""
    require(config, "attn_logit_softcapping", None, default=None)
    require(config, "final_logit_softcapping", None, default=None)
    require(config, "use_bidirectional_attention", False, default=False)
    shape = gemma.hf_shape(config)
    return TransformerConfig.of(
        **shape,
        **_hf_rope(config),
        qk_norm="head",
        post_norms=True,
        query_pre_attn_scalar=number(config, "query_pre_attn_scalar", 256.0),
        sliding_window=integer(config, "sliding_window", 4096),
        global_every=global_every(config, shape["num_layers"], _GLOBAL_EVERY),
    )


def fields_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The inverse of `config_from_hf`."""
    shape = gemma.fields_to_hf(config)
    local = next((layer.rotary for layer in config.kinds if layer.window), None)
    del shape["rope_theta"]
    shape["rope_parameters"] = {
        "full_attention": shape["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": local and local.theta},
    }
    return {**shape, **windows_to_hf(config)}


def _hf_rope(config: Config) -> dict[str, Any]:
    """Rotary settings of both kinds of layers: transformers 5 nests them, 4 names them apart."""
    settings = rope_settings(config)
    if any(isinstance(value, Mapping) for value in settings.values()):
        check_rope_keys(settings, ("full_attention", "sliding_attention"))
        of_global, of_local = (
            hf_rope({"rope_parameters": settings.get(f"{kind}_attention")}, theta=theta)
            for kind, theta in (("full", _ROPE_THETA), ("sliding", _LOCAL_ROPE_THETA))
        )
        if (of_local["rope_factor"], of_local["rope_scaling"]) != (1.0, None):
            raise CheckpointError(
                f"the checkpoint's config has rope_parameters = {settings!r}; the positions of "
                "sliding_attention layers must not be scaled."
            )
        return {**of_global, "local_rope_theta": of_local["rope_theta"]}
    local_theta = number(config, "rope_local_base_freq", _LOCAL_ROPE_THETA)
    return {**hf_rope(config, theta=_ROPE_THETA), "local_rope_theta": local_theta}


def config_from_gguf(metadata: Config, tensors: TensorStore) -> TransformerConfig:
    """Translates the metadata of a GGUF file of architecture `gemma3`."""
    require(metadata, "gemma3.final_logit_softcapping", 0.0, default=0.0)
    shape = gguf_fields(metadata, tensors, "gemma3", widest=62)
    shape["sliding_window"] = integer(metadata, "gemma3.attention.sliding_window")
    shape["rope_theta"] = number(metadata, "gemma3.rope.freq_base", _ROPE_THETA)
    return TransformerConfig.of(
        **shape,
        qk_norm="head",
        global_every=integer(metadata, "gemma3.attention.sliding_window_pattern", _GLOBAL_EVERY),
        local_rope_theta=number(metadata, "gemma3.rope.freq_base_swa", _LOCAL_ROPE_THETA),
    )


FAMILY = Family(
    model_type="gemma3_text",
    hf_class="Gemma3ForCausalLM",
    config_from_hf=config_from_hf,
    fields_to_hf=fields_to_hf,
    hf_weights={
        **HF_WEIGHTS,
        **HF_NORMS,
        "blocks.{}.attention.query_norm": plus_one("model.layers.{}.self_attn.q_norm"),
        "blocks.{}.attention.key_norm": plus_one("model.layers.{}.self_attn.k_norm"),
    },
    gguf_architecture="gemma3",
    config_from_gguf=config_from_gguf,
    gguf_weights={**GGUF_WEIGHTS, **QK_NORMS, **GGUF_NORMS},
)
