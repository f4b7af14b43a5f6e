"""T5 and Flan-T5 (arXiv 1910.10683, 2210.11416): an encoder-decoder with relative positions."""

import dataclasses
from typing import Any

from spec_jax.errors import CheckpointError
from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import (
    HF_ACTIVATIONS,
    Config,
    Family,
    WeightTable,
    attention_names,
    get,
    integer,
    read_fields,
    write_fields,
)

_NAMES = {
    "vocab_size": "vocab_size",
    "embed_size": "d_model",
    "num_layers": "num_layers",
    "num_heads": "num_heads",
    "head_dim": "d_kv",
    "mlp_size": "d_ff",
    "max_position": "n_positions",
    "norm_eps": "layer_norm_epsilon",
    "tied_head": "tie_word_embeddings",
    "relative_buckets": "relative_attention_num_buckets",
    "relative_distance": "relative_attention_max_distance",
}
_DEFAULTS: dict[str, Any] = {
    "max_position": 512,  # the length of training; config.json seldom names it
    "norm_eps": 1e-6,
    "tied_head": True,
    "relative_buckets": 32,
    "relative_distance": 128,
}


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `T5ForConditionalGeneration`."""
    projection = str(get(config, "feed_forward_proj", "relu"))
    gate, _, activation = projection.rpartition("-")
    if projection == "gated-gelu":
        activation = "gelu_new"
    if gate not in ("", "gated") or activation not in HF_ACTIVATIONS:
        raise CheckpointError(
            f"the checkpoint's config has feed_forward_proj = {projection!r}; expected one of "
            f"{', '.join(HF_ACTIVATIONS)}, with 'gated-' before it or not."
        )
    get(config, "d_kv")  # the width of heads does not follow from others
    encoder = TransformerConfig.of(
        **read_fields(config, _NAMES, **_DEFAULTS),
        activation=HF_ACTIVATIONS[activation],
        gated_mlp=gate == "gated",
        rope_fraction=0.0,
        query_pre_attn_scalar=1.0,
    )
    scaled = bool(get(config, "scale_decoder_outputs", encoder.tied_head))
    start = get(config, "decoder_start_token_id", get(config, "pad_token_id", 0))
    return dataclasses.replace(
        encoder.resized(integer(config, "num_decoder_layers", encoder.num_layers)),
        logit_scale=encoder.embed_size**-0.5 if scaled else 1.0,
        encoder=encoder,
        decoder_start=(int(start),),
    )


def fields_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The inverse of `config_from_hf`."""
    if config.encoder is None:
        raise CheckpointError("a T5 model has an encoder, and this one has none.")
    activation = {"gelu_tanh": "gelu_new"}.get(config.activation, config.activation)
    projection = f"gated-{activation}" if config.gated_mlp else activation
    return {
        **write_fields(config, _NAMES),
        "num_layers": config.encoder.num_layers,
        "is_encoder_decoder": True,
        "num_decoder_layers": config.num_layers,
        "feed_forward_proj": "gated-gelu" if projection == "gated-gelu_new" else projection,
        "scale_decoder_outputs": config.logit_scale != 1.0,
        "decoder_start_token_id": config.decoder_start[0],
        "pad_token_id": config.decoder_start[0],
    }


def _attention(ours: str, theirs: str) -> WeightTable:
    return attention_names(ours, theirs, ("q", "k", "v", "o"))


def _stack(ours: str, theirs: str, mlp: int, gated: bool) -> WeightTable:
    """An encoder's or a decoder's weights; `mlp` is the MLP's place in a block."""
    block, layer = f"{ours}blocks.{{}}.", f"{theirs}.block.{{}}.layer."
    ups = {"gate": "wi_0", "up": "wi_1"} if gated else {"up": "wi"}
    return {
        **_attention(f"{block}attention", f"{layer}0.SelfAttention"),
        f"{ours}relative": f"{theirs}.block.0.layer.0.SelfAttention.relative_attention_bias",
        f"{block}attention_norm": f"{layer}0.layer_norm",
        f"{block}mlp_norm": f"{layer}{mlp}.layer_norm",
        **{f"{block}mlp.{up}": f"{layer}{mlp}.DenseReluDense.{wi}" for up, wi in ups.items()},
        f"{block}mlp.down": f"{layer}{mlp}.DenseReluDense.wo",
        f"{ours}final_norm": f"{theirs}.final_layer_norm",
    }


def _hf_weights(config: TransformerConfig) -> WeightTable:
    return {
        "embed": "shared",
        **_stack("encoder.", "encoder", 1, config.gated_mlp),
        **_stack("", "decoder", 2, config.gated_mlp),
        "blocks.{}.cross_norm": "decoder.block.{}.layer.1.layer_norm",
        **_attention("blocks.{}.cross", "decoder.block.{}.layer.1.EncDecAttention"),
        "head": "lm_head",
    }


FAMILY = Family(
    model_type="t5",
    hf_class="T5ForConditionalGeneration",
    config_from_hf=config_from_hf,
    fields_to_hf=fields_to_hf,
    hf_weights=_hf_weights,
    # Copies of the embedding, and a table that old files contain and models do not read.
    buffers=("embed_tokens.weight", "EncDecAttention.relative_attention_bias.weight"),
)
