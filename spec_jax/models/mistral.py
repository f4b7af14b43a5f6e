"""Mistral (arXiv 2310.06825): Llama with, in version 0.1, a window. GGUF calls it `llama`."""

from typing import Any

from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import Config, Family, window
from spec_jax.models.llama import HF_WEIGHTS, hf_shape, shape_to_hf


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `MistralForCausalLM`."""
    shape = hf_shape(config)
    config = {"sliding_window": 4096, **config}  # absent is the first version's window
    shape["sliding_window"] = window(config, "sliding_window", shape["max_position"])
    return TransformerConfig.of(**shape)


def fields_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The inverse of `config_from_hf`."""
    return {**shape_to_hf(config), "sliding_window": config.sliding_window}


FAMILY = Family(
    model_type="mistral",
    hf_class="MistralForCausalLM",
    config_from_hf=config_from_hf,
    fields_to_hf=fields_to_hf,
    hf_weights=HF_WEIGHTS,
    gguf_as="llama",
)
