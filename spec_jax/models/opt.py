"""OPT (arXiv 2205.01068): learned positions from the table's third row on, ReLU."""

from typing import Any

import numpy as np

from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import (
    Config,
    Family,
    Part,
    WeightTable,
    attention_names,
    integer,
    read_fields,
    require,
    write_fields,
)
from spec_jax.models.gpt2 import BIASED, LEARNED

_FIRST = 2
"""The row of position 0."""

_NAMES = {
    "vocab_size": "vocab_size",
    "embed_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "mlp_size": "ffn_dim",
    "max_position": "max_position_embeddings",
    "activation": "activation_function",
    "tied_head": "tie_word_embeddings",
}


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of an `OPTForCausalLM`."""
    for name in ("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine"):
        require(config, name, True, default=True)
    require(config, "_remove_final_layer_norm", False, default=False)
    embed_size = integer(config, "hidden_size")
    require(config, "word_embed_proj_dim", embed_size, default=embed_size)
    shape = read_fields(config, _NAMES, activation="relu", tied_head=True)
    return TransformerConfig.of(**shape, **BIASED, **LEARNED)


def fields_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The inverse of `config_from_hf`."""
    return {**write_fields(config, _NAMES), "word_embed_proj_dim": config.embed_size}


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


def stack_weights(ours: str, theirs: str) -> WeightTable:
    """Where the layers of a stack lie, in OPT and Whisper."""
    block, layer = f"{ours}blocks.{{}}.", f"{theirs}.layers.{{}}."
    return {
        **attention_names(f"{block}attention", f"{layer}self_attn", PROJECTIONS),
        f"{block}attention_norm": f"{layer}self_attn_layer_norm",
        f"{block}mlp_norm": f"{layer}final_layer_norm",
        f"{block}mlp.up": f"{layer}fc1",
        f"{block}mlp.down": f"{layer}fc2",
    }


FAMILY = Family(
    model_type="opt",
    hf_class="OPTForCausalLM",
    config_from_hf=config_from_hf,
    fields_to_hf=fields_to_hf,
    hf_weights={
        "embed": "model.decoder.embed_tokens",
        "positions": Part(
            "model.decoder.embed_positions",
            lambda config: np.arange(_FIRST, _FIRST + config.max_position),
            lambda config: _FIRST + config.max_position,
        ),
        **stack_weights("", "model.decoder"),
        "final_norm": "model.decoder.final_layer_norm",
        "head": "lm_head",
    },
    prefix="model.",
)
