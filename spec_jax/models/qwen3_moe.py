"""Qwen3 with sparse experts (arXiv 2505.09388), in all layers or in some."""

from typing import Any

from spec_jax.errors import CheckpointError
from spec_jax.models.config import Experts, TransformerConfig
from spec_jax.models.family import Config, Family, Part, TensorStore, get, integer
from spec_jax.models.gguf_metadata import EXPERTS_OF_GGUF, GGUF_WEIGHTS, QK_NORMS, gguf_experts
from spec_jax.models.hf_rope import hf_rope, rope_to_hf
from spec_jax.models.llama import hf_shape, shape_to_hf
from spec_jax.models.mixtral import FUSED_EXPERTS, experts_of
from spec_jax.models.qwen2 import gguf_full_shape, refuse_sliding_window
from spec_jax.models.qwen3 import HF_WEIGHTS


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `Qwen3MoeForCausalLM`."""
    refuse_sliding_window(config)
    bias = bool(get(config, "attention_bias", False))
    shape = hf_shape(config)
    # transformers 5 has Mixtral's name for what checkpoints call num_experts.
    named = {"num_experts": config.get("num_local_experts"), **config}
    return TransformerConfig.of(
        **shape,
        **hf_rope(config),
        qk_norm="head",
        qkv_bias=bias,
        output_bias=bias,
        experts=Experts(
            count=integer(named, "num_experts", 128),
            per_token=integer(config, "num_experts_per_tok", 8),
            size=integer(config, "moe_intermediate_size", 768),
            normed=bool(get(config, "norm_topk_prob", False)),
        ),
        dense_layers=_dense_layers(config, shape["num_layers"]),
    )


def _dense_layers(config: Config, num_layers: int) -> tuple[int, ...]:
    step = integer(config, "decoder_sparse_step", 1)
    named = config.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(isinstance(layer, int) for layer in named):
        raise CheckpointError(
            f"the checkpoint's config has mlp_only_layers = {named!r}; expected a list of layers."
        )
    return tuple(i for i in range(num_layers) if i in named or (i + 1) % step)


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The config.json of a `Qwen3MoeForCausalLM` of this shape."""
    experts = experts_of(config)
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **shape_to_hf(config),
        **rope_to_hf(config),
        "attention_bias": config.qkv_bias,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.size,
        "norm_topk_prob": experts.normed,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, layer in enumerate(config.layers) if layer.mlp == "dense"],
    }


def config_from_gguf(metadata: Config, tensors: TensorStore) -> TransformerConfig:
    """Translates the metadata of a GGUF file of architecture `qwen3moe`; no layer is dense."""
    shape = gguf_full_shape(metadata, tensors, "qwen3moe")
    experts = gguf_experts(metadata, "qwen3moe", shape)
    return TransformerConfig.of(**shape, qk_norm="head", experts=experts)


_EXPERT = "model.layers.{}.mlp.experts.{}"

FAMILY = Family(
    model_type="qwen3_moe",
    config_from_hf=config_from_hf,
    hf_weights={
        **HF_WEIGHTS,
        "blocks.{}.mlp.router": "model.layers.{}.mlp.gate",
        "blocks.{}.mlp.expert_gate": Part(f"{_EXPERT}.gate_proj", each=True),
        "blocks.{}.mlp.expert_up": Part(f"{_EXPERT}.up_proj", each=True),
        "blocks.{}.mlp.expert_down": Part(f"{_EXPERT}.down_proj", each=True),
    },
    config_to_hf=config_to_hf,
    gguf_architecture="qwen3moe",
    config_from_gguf=config_from_gguf,
    gguf_weights={**GGUF_WEIGHTS, **QK_NORMS, **EXPERTS_OF_GGUF},
    fused_experts=FUSED_EXPERTS,
)
