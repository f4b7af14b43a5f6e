"""Qwen3 with sparse experts (arXiv 2505.09388), in all layers or in some."""

from typing import Any

from spec_jax.errors import CheckpointError
from spec_jax.models.config import Experts, TransformerConfig
from spec_jax.models.family import Config, Family, get, integer
from spec_jax.models.gguf_metadata import EXPERTS_OF_GGUF, GGUF_WEIGHTS, QK_NORMS, gguf_config
from spec_jax.models.llama import ATTENTION_BIAS, hf_shape, shape_to_hf
from spec_jax.models.mixtral import FUSED_EXPERTS, expert_names, experts_of
from spec_jax.models.qwen2 import refuse_sliding_window
from spec_jax.models.qwen3 import HF_WEIGHTS


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `Qwen3MoeForCausalLM`."""
    refuse_sliding_window(config)
    shape = hf_shape(config, ATTENTION_BIAS)
    # transformers 5 has Mixtral's name for what checkpoints call num_experts.
    config = {"num_experts": config.get("num_local_experts"), **config}
    return TransformerConfig.of(
        **shape,
        qk_norm="head",
        experts=Experts(
            count=integer(config, "num_experts", 128),
            per_token=integer(config, "num_experts_per_tok", 8),
            size=integer(config, "moe_intermediate_size", 768),
            normed=bool(get(config, "norm_topk_prob", False)),
        ),
        dense_layers=_dense_layers(config, shape["num_layers"]),
    )


def _dense_layers(config: Config, num_layers: int) -> tuple[int, ...]:
    step = integer(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise CheckpointError(
            f"the checkpoint's config has mlp_only_layers = {dense!r}; expected a list of layers."
        )
    return tuple(i for i in range(num_layers) if i in dense or (i + 1) % step)


def fields_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The inverse of `config_from_hf`."""
    experts = experts_of(config)
    return {
        **shape_to_hf(config, ATTENTION_BIAS),
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.size,
        "norm_topk_prob": experts.normed,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, layer in enumerate(config.layers) if layer.mlp == "dense"],
    }


FAMILY = Family(
    model_type="qwen3_moe",
    hf_class="Qwen3MoeForCausalLM",
    config_from_hf=config_from_hf,
    fields_to_hf=fields_to_hf,
    hf_weights={
        **HF_WEIGHTS,
        "blocks.{}.mlp.router": "model.layers.{}.mlp.gate",
        **expert_names("model.layers.{}.mlp", ("gate_proj", "up_proj", "down_proj")),
    },
    gguf_architecture="qwen3moe",
    config_from_gguf=gguf_config("qwen3moe", windowed=False, sparse=True, qk_norm="head"),
    gguf_weights={**GGUF_WEIGHTS, **QK_NORMS, **EXPERTS_OF_GGUF},
    fused_experts=FUSED_EXPERTS,
)
