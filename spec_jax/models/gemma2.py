"""Gemma 2 (arXiv 2408.00118): a window in every other layer, capped scores and logits."""

from typing import Any

from spec_jax.models import gemma
from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import Config, Family, TensorStore, integer, number, require
from spec_jax.models.gemma import GGUF_NORMS, HF_NORMS, gguf_fields, global_every, windows_to_hf
from spec_jax.models.gguf_metadata import GGUF_WEIGHTS
from spec_jax.models.hf_rope import hf_rope
from spec_jax.models.llama import HF_WEIGHTS

_GLOBAL_EVERY = 2
_SCORE_CAP, _LOGIT_CAP = 50.0, 30.0


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `Gemma2ForCausalLM`."""
    require(config, "use_bidirectional_attention", False, default=False)
    shape = gemma.hf_shape(config)
    # An absent cap has the default; null means none.
    caps = {"attn_logit_softcapping": _SCORE_CAP, "final_logit_softcapping": _LOGIT_CAP, **config}
    score_cap, logit_cap = (
        number(caps, name) if caps[name] else None
        for name in ("attn_logit_softcapping", "final_logit_softcapping")
    )
    return TransformerConfig.of(
        **shape,
        **hf_rope(config),
        post_norms=True,
        query_pre_attn_scalar=number(config, "query_pre_attn_scalar", 256.0),
        sliding_window=integer(config, "sliding_window", 4096),
        global_every=global_every(config, shape["num_layers"], _GLOBAL_EVERY),
        score_cap=score_cap,
        logit_cap=logit_cap,
    )


def fields_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The inverse of `config_from_hf`."""
    return {
        **gemma.fields_to_hf(config),
        **windows_to_hf(config),
        "attn_logit_softcapping": config.score_cap,
        "final_logit_softcapping": config.logit_cap,
    }


def config_from_gguf(metadata: Config, tensors: TensorStore) -> TransformerConfig:
    """Translates the metadata of a GGUF file of architecture `gemma2`."""
    shape = gguf_fields(metadata, tensors, "gemma2", widest=46)
    shape["sliding_window"] = integer(metadata, "gemma2.attention.sliding_window", 4096)
    return TransformerConfig.of(
        **shape,
        global_every=_GLOBAL_EVERY,
        score_cap=number(metadata, "gemma2.attn_logit_softcapping", _SCORE_CAP),
        logit_cap=number(metadata, "gemma2.final_logit_softcapping", _LOGIT_CAP),
    )


FAMILY = Family(
    model_type="gemma2",
    hf_class="Gemma2ForCausalLM",
    config_from_hf=config_from_hf,
    fields_to_hf=fields_to_hf,
    hf_weights={**HF_WEIGHTS, **HF_NORMS},
    gguf_architecture="gemma2",
    config_from_gguf=config_from_gguf,
    gguf_weights={**GGUF_WEIGHTS, **GGUF_NORMS},
)
