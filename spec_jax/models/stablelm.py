"""StableLM 2 and 3B (Stability AI 2023): layer norms, partial rotation, perhaps parallel."""

from typing import Any

from spec_jax.errors import CheckpointError
from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import Config, Family, TensorStore, get, number, require
from spec_jax.models.gguf_metadata import GGUF_WEIGHTS, gguf_shape
from spec_jax.models.hf_rope import hf_rope, rope_to_hf
from spec_jax.models.llama import HF_WEIGHTS, hf_shape, shape_to_hf


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `StableLmForCausalLM`."""
    require(config, "qk_layernorm", False, default=False)
    parallel = bool(get(config, "use_parallel_residual", False))
    own = {name: value for name, value in config.items() if name != "partial_rotary_factor"}
    return TransformerConfig.of(
        **hf_shape(own)
        | {
            "norm": "layer",
            "norm_eps": number(config, "layer_norm_eps", 1e-5),
            "qkv_bias": bool(get(config, "use_qkv_bias", False)),
            "parallel_residual": parallel,
            "shared_norm": parallel,
        },
        **hf_rope(config, fraction=0.25),
    )


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The config.json of a `StableLmForCausalLM` of this shape."""
    return {
        "architectures": ["StableLmForCausalLM"],
        "model_type": "stablelm",
        **shape_to_hf(config),
        **rope_to_hf(config),
        "layer_norm_eps": config.norm_eps,
        "use_qkv_bias": config.qkv_bias,
        "use_parallel_residual": config.parallel_residual,
        "partial_rotary_factor": config.rotated.fraction,
    }


def config_from_gguf(metadata: Config, tensors: TensorStore) -> TransformerConfig:
    """Translates the metadata of a GGUF file of architecture `stablelm`."""
    if "blk.0.attn_q_norm.weight" in tensors.shapes:
        raise CheckpointError(
            "the GGUF file has a tensor 'blk.0.attn_q_norm.weight', as that of StableLM 2 12B; "
            "spec-jax supports stablelm without norms of queries and keys only."
        )
    shape = gguf_shape(metadata, tensors, "stablelm", norm="layer", partial=True)
    parallel = "blk.0.ffn_norm.weight" not in tensors.shapes
    return TransformerConfig.of(**shape, parallel_residual=parallel, shared_norm=parallel)


FAMILY = Family(
    model_type="stablelm",
    config_from_hf=config_from_hf,
    hf_weights=HF_WEIGHTS,
    config_to_hf=config_to_hf,
    gguf_architecture="stablelm",
    config_from_gguf=config_from_gguf,
    gguf_weights=GGUF_WEIGHTS,
)
