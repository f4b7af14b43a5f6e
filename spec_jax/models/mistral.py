"""Mistral (arXiv 2310.06825): Llama with, in version 0.1, a window. GGUF calls it `llama`."""

from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import Config, Family, hf_rope, window
from spec_jax.models.llama import HF_WEIGHTS, hf_shape


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `MistralForCausalLM`."""
    shape = hf_shape(config)
    named = {"sliding_window": 4096, **config}  # absent is the first version's window
    return TransformerConfig(
        **shape,
        **hf_rope(config),
        sliding_window=window(named, "sliding_window", shape["max_position"]),
    )


FAMILY = Family(model_type="mistral", config_from_hf=config_from_hf, hf_weights=HF_WEIGHTS)
