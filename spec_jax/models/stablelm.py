"""StableLM 2 and 3B (Stability AI 2023): layer norms, partial rotation, perhaps parallel."""

from typing import Any

from spec_jax.errors import CheckpointError
from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import Config, Family, TensorStore, require
from spec_jax.models.gguf_metadata import GGUF_WEIGHTS, gguf_shape
from spec_jax.models.llama import HF_WEIGHTS, hf_shape, shape_to_hf

_NAMES = {
    "norm_eps": "layer_norm_eps",
    "qkv_bias": "use_qkv_bias",
    "parallel_residual": "use_parallel_residual",
    "shared_norm": "use_parallel_residual",
}


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `StableLmForCausalLM`."""
    require(config, "qk_layernorm", False, default=False)
    return TransformerConfig.of(
        **hf_shape(config, _NAMES, fraction=0.25, norm_eps=1e-5), norm="layer"
    )


def fields_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The inverse of `config_from_hf`."""
    fraction = config.rotated.fraction
    return {**shape_to_hf(config, _NAMES), "partial_rotary_factor": fraction}


def config_from_gguf(metadata: Config, tensors: TensorStore) -> TransformerConfig:
    """Translates the metadata of a GGUF file of architecture `stablelm`."""
    if "blk.0.attn_q_norm.weight" in tensors.shapes:
        raise CheckpointError(
            "the GGUF file has a tensor 'blk.0.attn_q_norm.weight', like StableLM 2 12B; spec-jax "
            "supports stablelm without norms of queries and keys only."
        )
    shape = gguf_shape(metadata, tensors, "stablelm", norm="layer", partial=True)
    parallel = "blk.0.ffn_norm.weight" not in tensors.shapes
    return TransformerConfig.of(**shape, parallel_residual=parallel, shared_norm=parallel)


FAMILY = Family(
    model_type="stablelm",
    hf_class="StableLmForCausalLM",
    config_from_hf=config_from_hf,
    fields_to_hf=fields_to_hf,
    hf_weights=HF_WEIGHTS,
    gguf_architecture="stablelm",
    config_from_gguf=config_from_gguf,
    gguf_weights=GGUF_WEIGHTS,
)
