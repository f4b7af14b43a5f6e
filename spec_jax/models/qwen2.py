"""Qwen2 and Qwen2.5 (arXiv 2407.10671): Llama with biases on query, key and value."""

from spec_jax.errors import CheckpointError
from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import Config, Family, require
from spec_jax.models.gguf_metadata import GGUF_WEIGHTS, gguf_config
from spec_jax.models.llama import HF_WEIGHTS, hf_shape, shape_to_hf


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `Qwen2ForCausalLM`."""
    refuse_sliding_window(config)
    return TransformerConfig.of(**hf_shape(config), qkv_bias=True)


def refuse_sliding_window(config: Config) -> None:
    """Raises if some layers see only a window of the context."""
    require(config, "use_sliding_window", False, default=False)
    kinds = set(config.get("layer_types") or ())
    if kinds - {"full_attention"}:
        raise CheckpointError(
            f"the checkpoint's config has layer_types {', '.join(sorted(kinds))}; supported: "
            "full_attention."
        )


FAMILY = Family(
    model_type="qwen2",
    hf_class="Qwen2ForCausalLM",
    config_from_hf=config_from_hf,
    fields_to_hf=shape_to_hf,
    hf_weights=HF_WEIGHTS,
    gguf_architecture="qwen2",
    config_from_gguf=gguf_config("qwen2", windowed=False, qkv_bias=True),
    gguf_weights=GGUF_WEIGHTS,
)
