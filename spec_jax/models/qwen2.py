"""Qwen2 and Qwen2.5 (arXiv 2407.10671): Llama with biases on query, key and value."""

from typing import Any

from spec_jax.errors import CheckpointError
from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import Config, Family, TensorStore, require
from spec_jax.models.gguf_metadata import GGUF_WEIGHTS, gguf_shape
from spec_jax.models.hf_rope import hf_rope, rope_to_hf
from spec_jax.models.llama import HF_WEIGHTS, hf_shape, shape_to_hf


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `Qwen2ForCausalLM`."""
    refuse_sliding_window(config)
    return TransformerConfig.of(**hf_shape(config), **hf_rope(config), qkv_bias=True)


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The config.json of a `Qwen2ForCausalLM` of this shape."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        **shape_to_hf(config),
        **rope_to_hf(config),
    }


def refuse_sliding_window(config: Config) -> None:
    """Raises if some layers see only a window of the context."""
    require(config, "use_sliding_window", False, default=False)
    kinds = set(config.get("layer_types") or ())
    if kinds - {"full_attention"}:
        raise CheckpointError(
            f"the checkpoint's config has layer_types {', '.join(sorted(kinds))}; supported: "
            "full_attention."
        )


def config_from_gguf(metadata: Config, tensors: TensorStore) -> TransformerConfig:
    """Translates the metadata of a GGUF file of architecture `qwen2`."""
    shape = gguf_full_shape(metadata, tensors, "qwen2")
    shape["qkv_bias"] = True
    return TransformerConfig.of(**shape)


def gguf_full_shape(metadata: Config, tensors: TensorStore, architecture: str) -> dict[str, Any]:
    """`gguf_shape`, refusing a window: GGUF does not say which of Qwen's layers have it."""
    shape = gguf_shape(metadata, tensors, architecture)
    if shape["sliding_window"] is not None:
        raise CheckpointError(
            f"{architecture}.attention.sliding_window is {shape['sliding_window']}, less than the "
            f"context of {shape['max_position']}; spec-jax supports {architecture} without "
            "windows only."
        )
    return shape


FAMILY = Family(
    model_type="qwen2",
    config_from_hf=config_from_hf,
    hf_weights=HF_WEIGHTS,
    config_to_hf=config_to_hf,
    gguf_architecture="qwen2",
    config_from_gguf=config_from_gguf,
    gguf_weights=GGUF_WEIGHTS,
)
