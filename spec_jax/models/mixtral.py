"""Mixtral (arXiv 2401.04088): Mistral with sparse experts. GGUF calls it `llama`."""

from typing import Any

from spec_jax.errors import CheckpointError
from spec_jax.models import mistral
from spec_jax.models.config import Experts, TransformerConfig
from spec_jax.models.family import Config, Family, Part, WeightTable, fused, integer, window
from spec_jax.models.llama import HF_WEIGHTS, hf_shape


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `MixtralForCausalLM`."""
    shape = hf_shape({"rms_norm_eps": 1e-5, **config}, theta=1e6)
    return TransformerConfig.of(
        **shape,
        sliding_window=window(config, "sliding_window", shape["max_position"]),
        experts=Experts(
            count=integer(config, "num_local_experts", 8),
            per_token=integer(config, "num_experts_per_tok", 2),
            size=shape["mlp_size"],
        ),
    )


def fields_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The inverse of `config_from_hf`."""
    experts = experts_of(config)
    return {
        **mistral.fields_to_hf(config),
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
    }


def experts_of(config: TransformerConfig) -> Experts:
    """The experts of a shape.

    Raises:
      CheckpointError: it has none.
    """
    if config.experts is None:
        raise CheckpointError("a family with experts has no models without them.")
    return config.experts


def expert_names(name: str, names: tuple[str, str, str]) -> WeightTable:
    """Gate, up and down matrices that are stored as one tensor for each expert."""
    parts = zip(("gate", "up", "down"), names, strict=True)
    return {
        f"blocks.{{}}.mlp.expert_{part}": Part(f"{name}.experts.{{}}.{each}", each=True)
        for part, each in parts
    }


def _sizes(config: TransformerConfig) -> tuple[int, int]:
    return experts_of(config).size, experts_of(config).size


_GATE_UP = "model.layers.{}.mlp.experts.gate_up_proj"

FUSED_EXPERTS: WeightTable = {
    "blocks.{}.mlp.router": "model.layers.{}.mlp.gate",
    "blocks.{}.mlp.expert_gate": fused(_GATE_UP, _sizes, 0, bare=True),
    "blocks.{}.mlp.expert_up": fused(_GATE_UP, _sizes, 1, bare=True),
    "blocks.{}.mlp.expert_down": Part("model.layers.{}.mlp.experts.down_proj", bare=True),
}
"""The names that transformers 5 uses for experts in memory, and in files of that format."""

FAMILY = Family(
    model_type="mixtral",
    hf_class="MixtralForCausalLM",
    config_from_hf=config_from_hf,
    fields_to_hf=fields_to_hf,
    hf_weights={
        **{name: entry for name, entry in HF_WEIGHTS.items() if ".mlp." not in name},
        "blocks.{}.mlp.router": "model.layers.{}.block_sparse_moe.gate",
        **expert_names("model.layers.{}.block_sparse_moe", ("w1", "w3", "w2")),
    },
    gguf_as="llama",
    fused_experts=FUSED_EXPERTS,
)
