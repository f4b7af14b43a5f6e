"""Mistral (arXiv 2310.06825): Llama with, in version 0.1, a window. GGUF calls it `llama`."""

from typing import Any

from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import Config, Family, window
from spec_jax.models.hf_rope import hf_rope, rope_to_hf
from spec_jax.models.llama import HF_WEIGHTS, hf_shape, shape_to_hf


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `MistralForCausalLM`."""
    shape = hf_shape(config)
    named = {"sliding_window": 4096, **config}  # absent is the first version's window
    return TransformerConfig.of(
        **shape,
        **hf_rope(config),
        sliding_window=window(named, "sliding_window", shape["max_position"]),
    )


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The config.json of a `MistralForCausalLM` of this shape."""
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        **shape_to_hf(config),
        **rope_to_hf(config),
        "sliding_window": config.sliding_window,
    }


FAMILY = Family(
    model_type="mistral",
    config_from_hf=config_from_hf,
    hf_weights=HF_WEIGHTS,
    config_to_hf=config_to_hf,
    gguf_as="llama",
)
