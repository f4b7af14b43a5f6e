"""StarCoder 2 (arXiv 2402.19173): rotary positions, layer norms, biases, an MLP of two matrices."""

from typing import Any

from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import (
    Config,
    Family,
    TensorStore,
    activation_to_hf,
    get,
    number,
    window,
)
from spec_jax.models.gguf_metadata import GGUF_WEIGHTS, gguf_shape
from spec_jax.models.gpt2 import hf_tied
from spec_jax.models.hf_rope import hf_rope, rope_to_hf
from spec_jax.models.llama import HF_WEIGHTS, hf_shape, shape_to_hf


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `Starcoder2ForCausalLM`."""
    bias = bool(get(config, "use_bias", True))
    shape = hf_shape({"hidden_act": "gelu_pytorch_tanh", **config})
    return TransformerConfig.of(
        **shape
        | {
            "norm": "layer",
            "norm_eps": number(config, "norm_epsilon", 1e-5),
            "gated_mlp": False,
            "sliding_window": window(config, "sliding_window", shape["max_position"]),
            "qkv_bias": bias,
            "output_bias": bias,
            "mlp_bias": bias,
            "tied_head": hf_tied(config),
        },
        **hf_rope(config),
    )


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The config.json of a `Starcoder2ForCausalLM` of this shape."""
    return {
        **shape_to_hf(config),
        **rope_to_hf(config),
        "architectures": ["Starcoder2ForCausalLM"],
        "model_type": "starcoder2",
        "hidden_act": activation_to_hf(config),
        "norm_epsilon": config.norm_eps,
        "sliding_window": config.sliding_window,
        "use_bias": config.mlp_bias,
    }


def config_from_gguf(metadata: Config, tensors: TensorStore) -> TransformerConfig:
    """Translates the metadata of a GGUF file of architecture `starcoder2`."""
    shape = gguf_shape(metadata, tensors, "starcoder2", norm="layer")
    return TransformerConfig.of(**shape | {"activation": "gelu_tanh", "gated_mlp": False})


FAMILY = Family(
    model_type="starcoder2",
    config_from_hf=config_from_hf,
    hf_weights={
        **{name: entry for name, entry in HF_WEIGHTS.items() if "mlp." not in name},
        "blocks.{}.mlp.up": "model.layers.{}.mlp.c_fc",
        "blocks.{}.mlp.down": "model.layers.{}.mlp.c_proj",
    },
    config_to_hf=config_to_hf,
    gguf_architecture="starcoder2",
    config_from_gguf=config_from_gguf,
    gguf_weights=GGUF_WEIGHTS,
)
