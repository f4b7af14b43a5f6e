"""OLMo 2 (arXiv 2501.00656): norms after attention and MLP, and over whole queries and keys."""

from typing import Any

from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import Config, Family
from spec_jax.models.gemma import GGUF_NORMS
from spec_jax.models.gguf_metadata import GGUF_WEIGHTS, QK_NORMS, gguf_config
from spec_jax.models.llama import ATTENTION_BIAS, HF_WEIGHTS, hf_shape, shape_to_hf
from spec_jax.models.qwen3 import HF_QK_NORMS

_NORMS: dict[str, Any] = {"qk_norm": "projection", "pre_norms": False, "post_norms": True}
_PRE_NORMS = ("blocks.{}.attention_norm", "blocks.{}.mlp_norm")


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of an `Olmo2ForCausalLM`."""
    return TransformerConfig.of(
        **hf_shape({"rms_norm_eps": 1e-5, **config}, ATTENTION_BIAS), **_NORMS
    )


FAMILY = Family(
    model_type="olmo2",
    hf_class="Olmo2ForCausalLM",
    config_from_hf=config_from_hf,
    fields_to_hf=lambda config: shape_to_hf(config, ATTENTION_BIAS),
    hf_weights={
        **{name: entry for name, entry in HF_WEIGHTS.items() if name not in _PRE_NORMS},
        **HF_QK_NORMS,
        "blocks.{}.attention_post_norm": "model.layers.{}.post_attention_layernorm",
        "blocks.{}.mlp_post_norm": "model.layers.{}.post_feedforward_layernorm",
    },
    gguf_architecture="olmo2",
    # OLMo 3 has the same architecture, and windows in some layers.
    config_from_gguf=gguf_config("olmo2", windowed=False, **_NORMS),
    gguf_weights={**GGUF_WEIGHTS, **QK_NORMS, **GGUF_NORMS},
)
