"""StarCoder 2 (arXiv 2402.19173): rotary positions, layer norms, biases, an MLP of two matrices."""

from typing import Any

from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import Config, Family, window
from spec_jax.models.gguf_metadata import GGUF_WEIGHTS, gguf_config
from spec_jax.models.llama import HF_WEIGHTS, hf_shape, shape_to_hf

_BIASES = ("qkv_bias", "output_bias", "mlp_bias")
_NAMES = {"norm_eps": "norm_epsilon", **dict.fromkeys(_BIASES, "use_bias")}


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `Starcoder2ForCausalLM`."""
    config = {"hidden_act": "gelu_pytorch_tanh", **config}
    defaults = {"norm_eps": 1e-5, "tied_head": True, **dict.fromkeys(_BIASES, True)}
    shape = hf_shape(config, _NAMES, **defaults)
    return TransformerConfig.of(
        **shape,
        norm="layer",
        gated_mlp=False,
        sliding_window=window(config, "sliding_window", shape["max_position"]),
    )


def fields_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The inverse of `config_from_hf`."""
    return {**shape_to_hf(config, _NAMES), "sliding_window": config.sliding_window}


FAMILY = Family(
    model_type="starcoder2",
    hf_class="Starcoder2ForCausalLM",
    config_from_hf=config_from_hf,
    fields_to_hf=fields_to_hf,
    hf_weights={
        **{name: entry for name, entry in HF_WEIGHTS.items() if "mlp." not in name},
        "blocks.{}.mlp.up": "model.layers.{}.mlp.c_fc",
        "blocks.{}.mlp.down": "model.layers.{}.mlp.c_proj",
    },
    gguf_architecture="starcoder2",
    config_from_gguf=gguf_config(
        "starcoder2", norm="layer", activation="gelu_tanh", gated_mlp=False
    ),
    gguf_weights=GGUF_WEIGHTS,
)
