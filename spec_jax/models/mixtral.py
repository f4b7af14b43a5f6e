"""Mixtral (arXiv 2401.04088): Mistral with sparse experts. GGUF calls it `llama`."""

from typing import Any

from spec_jax.errors import CheckpointError
from spec_jax.models.config import Experts, TransformerConfig
from spec_jax.models.family import Config, Family, Part, WeightTable, fused, integer, window
from spec_jax.models.hf_rope import hf_rope, rope_to_hf
from spec_jax.models.llama import HF_WEIGHTS, hf_shape, shape_to_hf


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `MixtralForCausalLM`."""
    shape = hf_shape({"rms_norm_eps": 1e-5, **config})
    return TransformerConfig.of(
        **shape,
        **hf_rope(config, theta=1e6),
        sliding_window=window(config, "sliding_window", shape["max_position"]),
        experts=Experts(
            count=integer(config, "num_local_experts", 8),
            per_token=integer(config, "num_experts_per_tok", 2),
            size=shape["mlp_size"],
        ),
    )


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The config.json of a `MixtralForCausalLM` of this shape."""
    experts = experts_of(config)
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        **shape_to_hf(config),
        **rope_to_hf(config),
        "sliding_window": config.sliding_window,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
    }


def experts_of(config: TransformerConfig) -> Experts:
    """A shape's experts.

    Raises:
      CheckpointError: it has none.
    """
    if config.experts is None:
        raise CheckpointError("a family with experts has no models without them.")
    return config.experts


def _expert_sizes(config: TransformerConfig) -> tuple[int, int]:
    return experts_of(config).size, experts_of(config).size


_GATE_UP = "model.layers.{}.mlp.experts.gate_up_proj"

FUSED_EXPERTS: WeightTable = {
    "blocks.{}.mlp.router": "model.layers.{}.mlp.gate",
    "blocks.{}.mlp.expert_gate": fused(_GATE_UP, _expert_sizes, 0, bare=True),
    "blocks.{}.mlp.expert_up": fused(_GATE_UP, _expert_sizes, 1, bare=True),
    "blocks.{}.mlp.expert_down": Part("model.layers.{}.mlp.experts.down_proj", bare=True),
}
"""Where transformers 5 has experts, and writes them if it is told to keep its own format."""

_SPARSE = "model.layers.{}.block_sparse_moe"

FAMILY = Family(
    model_type="mixtral",
    config_from_hf=config_from_hf,
    hf_weights={
        **{name: entry for name, entry in HF_WEIGHTS.items() if ".mlp." not in name},
        "blocks.{}.mlp.router": f"{_SPARSE}.gate",
        "blocks.{}.mlp.expert_gate": Part(_SPARSE + ".experts.{}.w1", each=True),
        "blocks.{}.mlp.expert_up": Part(_SPARSE + ".experts.{}.w3", each=True),
        "blocks.{}.mlp.expert_down": Part(_SPARSE + ".experts.{}.w2", each=True),
    },
    config_to_hf=config_to_hf,
    gguf_as="llama",
    fused_experts=FUSED_EXPERTS,
)
