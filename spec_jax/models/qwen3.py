"""Qwen3 (arXiv 2505.09388), dense: Llama with a norm on every query and key head."""

from spec_jax.models import llama
from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import Config, Family
from spec_jax.models.gguf_metadata import GGUF_WEIGHTS, QK_NORMS, gguf_config
from spec_jax.models.llama import ATTENTION_BIAS, hf_shape, shape_to_hf
from spec_jax.models.qwen2 import refuse_sliding_window


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `Qwen3ForCausalLM`."""
    refuse_sliding_window(config)
    shape = hf_shape({"head_dim": 128, **config}, ATTENTION_BIAS)
    return TransformerConfig.of(**shape, qk_norm="head")


HF_QK_NORMS = {
    "blocks.{}.attention.query_norm": "model.layers.{}.self_attn.q_norm",
    "blocks.{}.attention.key_norm": "model.layers.{}.self_attn.k_norm",
}
HF_WEIGHTS = {**llama.HF_WEIGHTS, **HF_QK_NORMS}

FAMILY = Family(
    model_type="qwen3",
    hf_class="Qwen3ForCausalLM",
    config_from_hf=config_from_hf,
    fields_to_hf=lambda config: shape_to_hf(config, ATTENTION_BIAS),
    hf_weights=HF_WEIGHTS,
    gguf_architecture="qwen3",
    config_from_gguf=gguf_config("qwen3", windowed=False, qk_norm="head"),
    gguf_weights={**GGUF_WEIGHTS, **QK_NORMS},
)
