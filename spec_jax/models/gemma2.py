"""Gemma 2 (arXiv 2408.00118): a window in every other layer, capped scores and logits."""

from dataclasses import replace
from typing import Any

from spec_jax.models import gemma
from spec_jax.models.config import TransformerConfig, layer_stack
from spec_jax.models.family import Config, Family, TensorStore, integer, number, require
from spec_jax.models.gemma import GGUF_NORMS, HF_NORMS, global_every
from spec_jax.models.gguf_metadata import GGUF_WEIGHTS, gguf_shape
from spec_jax.models.hf_rope import hf_rope
from spec_jax.models.llama import HF_WEIGHTS

_GLOBAL_EVERY = 2
_SCORE_CAP, _LOGIT_CAP = 50.0, 30.0
_LAYERS_OF_27B = 46


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `Gemma2ForCausalLM`."""
    require(config, "use_bidirectional_attention", False, default=False)
    shape = gemma.config_from_hf(config)

    def cap(name: str, default: float) -> float | None:
        named = {name: default, **config}  # null, unlike nothing, is no cap
        return number(named, name) if named[name] else None

    return replace(
        shape,
        post_norms=True,
        query_pre_attn_scalar=number(config, "query_pre_attn_scalar", 256.0),
        layers=layer_stack(
            shape.num_layers,
            **hf_rope(config),
            sliding_window=integer(config, "sliding_window", 4096),
            global_every=global_every(config, shape.num_layers, _GLOBAL_EVERY),
        ),
        score_cap=cap("attn_logit_softcapping", _SCORE_CAP),
        logit_cap=cap("final_logit_softcapping", _LOGIT_CAP),
    )


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The config.json of a `Gemma2ForCausalLM` of this shape."""
    return {
        **gemma.config_to_hf(config),
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "query_pre_attn_scalar": int(config.query_pre_attn_scalar or config.head_dim),
        "sliding_window": config.sliding_window,
        "layer_types": [
            "sliding_attention" if layer.window else "full_attention" for layer in config.layers
        ],
        "attn_logit_softcapping": config.score_cap,
        "final_logit_softcapping": config.logit_cap,
    }


def config_from_gguf(metadata: Config, tensors: TensorStore) -> TransformerConfig:
    """Translates the metadata of a GGUF file of architecture `gemma2`.

    Missing metadata have the same defaults as in llama.cpp.
    """
    shape = gguf_shape(metadata, tensors, "gemma2")
    shape["sliding_window"] = integer(metadata, "gemma2.attention.sliding_window", 4096)
    # Only the 27B model scales its scores by something else than its head's width.
    widest = shape["num_layers"] == _LAYERS_OF_27B
    scalar = shape["embed_size"] // shape["num_heads"] if widest else shape["head_dim"]
    return TransformerConfig.of(
        **shape,
        activation="gelu_tanh",
        embedding_scale=shape["embed_size"] ** 0.5,
        post_norms=True,
        query_pre_attn_scalar=float(scalar),
        global_every=_GLOBAL_EVERY,
        score_cap=number(metadata, "gemma2.attn_logit_softcapping", _SCORE_CAP),
        logit_cap=number(metadata, "gemma2.final_logit_softcapping", _LOGIT_CAP),
    )


FAMILY = Family(
    model_type="gemma2",
    config_from_hf=config_from_hf,
    hf_weights={**HF_WEIGHTS, **HF_NORMS},
    config_to_hf=config_to_hf,
    gguf_architecture="gemma2",
    config_from_gguf=config_from_gguf,
    gguf_weights={**GGUF_WEIGHTS, **GGUF_NORMS},
)
