"""Mistral (arXiv 2310.06825) with full attention: version 0.2 and later. GGUF calls it `llama`."""

from spec_jax.errors import CheckpointError
from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import Config, Family, hf_rope
from spec_jax.models.llama import HF_WEIGHTS, hf_shape


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `MistralForCausalLM`."""
    shape = hf_shape(config)
    window = config.get("sliding_window", 4096)  # absent is the first version's window
    if window is not None and window < shape["max_position"]:
        raise CheckpointError(
            f"the checkpoint's config has sliding_window = {window}, less than its context of "
            f"{shape['max_position']}; sliding-window attention is not supported."
        )
    return TransformerConfig(**shape, **hf_rope(config))


FAMILY = Family(model_type="mistral", config_from_hf=config_from_hf, hf_weights=HF_WEIGHTS)
