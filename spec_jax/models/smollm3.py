"""SmolLM3 (Hugging Face 2025): Llama with no positions in every fourth layer (arXiv 2501.18795)."""

from typing import Any

from spec_jax.errors import CheckpointError
from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import Config, Family, get, integer
from spec_jax.models.gguf_metadata import GGUF_WEIGHTS, PAIRED_QK, gguf_config
from spec_jax.models.llama import ALL_BIASES, HF_WEIGHTS, hf_shape, shape_to_hf
from spec_jax.models.qwen2 import refuse_sliding_window


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `SmolLM3ForCausalLM`."""
    refuse_sliding_window(config)
    shape = hf_shape({"tie_word_embeddings": True, **config}, ALL_BIASES, theta=2e6)
    every = _unrotated_every(config, shape["num_layers"])
    return TransformerConfig.of(**shape, unrotated_every=every)


def _unrotated_every(config: Config, num_layers: int) -> int | None:
    """Every how many layers one has no positions; newer configs list all layers, 1 if rotated."""
    kinds = get(config, "no_rope_layers", ())
    if not kinds:
        return integer(config, "no_rope_layer_interval", 4)
    every = kinds.index(0) + 1 if 0 in kinds else None
    expected = [int(not every or (i + 1) % every > 0) for i in range(num_layers)]
    if [int(each) for each in kinds] != expected:
        raise CheckpointError(
            f"the checkpoint's config has no_rope_layers = {list(kinds)!r}; supported: one for "
            "each layer, and 0 at regular intervals."
        )
    return every


def fields_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The inverse of `config_from_hf`."""
    return {
        **shape_to_hf(config, ALL_BIASES),
        "pad_token_id": None,
        "no_rope_layers": [int(layer.rotary is not None) for layer in config.layers],
    }


FAMILY = Family(
    model_type="smollm3",
    hf_class="SmolLM3ForCausalLM",
    config_from_hf=config_from_hf,
    fields_to_hf=fields_to_hf,
    hf_weights=HF_WEIGHTS,
    gguf_architecture="smollm3",
    config_from_gguf=gguf_config("smollm3", unrotated_every=4),
    gguf_weights={**GGUF_WEIGHTS, **PAIRED_QK},
)
