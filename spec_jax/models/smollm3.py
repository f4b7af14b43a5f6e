"""SmolLM3 (Hugging Face 2025): Llama with no positions in every fourth layer (arXiv 2501.18795)."""

from typing import Any

from spec_jax.errors import CheckpointError
from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import Config, Family, TensorStore, get, integer
from spec_jax.models.gguf_metadata import GGUF_WEIGHTS, PAIRED_QK, gguf_shape
from spec_jax.models.hf_rope import hf_rope, rope_to_hf
from spec_jax.models.llama import HF_WEIGHTS, hf_shape, shape_to_hf
from spec_jax.models.qwen2 import refuse_sliding_window


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `SmolLM3ForCausalLM`."""
    refuse_sliding_window(config)
    bias = bool(get(config, "attention_bias", False))
    shape = hf_shape({"tie_word_embeddings": True, **config})
    return TransformerConfig.of(
        **shape,
        **hf_rope(config, theta=2e6),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(get(config, "mlp_bias", False)),
        unrotated_every=_unrotated_every(config, shape["num_layers"]),
    )


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


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The config.json of a `SmolLM3ForCausalLM` of this shape."""
    return {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        **shape_to_hf(config),
        **rope_to_hf(config),
        "attention_bias": config.qkv_bias,
        "pad_token_id": None,
        "mlp_bias": config.mlp_bias,
        "no_rope_layers": [int(layer.rotary is not None) for layer in config.layers],
    }


def config_from_gguf(metadata: Config, tensors: TensorStore) -> TransformerConfig:
    """Translates the metadata of a GGUF file of architecture `smollm3`."""
    return TransformerConfig.of(**gguf_shape(metadata, tensors, "smollm3"), unrotated_every=4)


FAMILY = Family(
    model_type="smollm3",
    config_from_hf=config_from_hf,
    hf_weights=HF_WEIGHTS,
    config_to_hf=config_to_hf,
    gguf_architecture="smollm3",
    config_from_gguf=config_from_gguf,
    gguf_weights={**GGUF_WEIGHTS, **PAIRED_QK},
)
