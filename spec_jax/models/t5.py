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
    get,
    integer,
    number,
)

_CONTEXT = 512
"""What they were trained for; config.json seldom says, and relative positions go on."""


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
    tied = bool(get(config, "tie_word_embeddings", True))
    embed_size, num_heads = integer(config, "d_model"), integer(config, "num_heads")
    encoder = TransformerConfig.of(
        vocab_size=integer(config, "vocab_size"),
        embed_size=embed_size,
        num_layers=integer(config, "num_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=integer(config, "d_kv"),
        mlp_size=integer(config, "d_ff"),
        max_position=integer(config, "n_positions", _CONTEXT),
        norm_eps=number(config, "layer_norm_epsilon", 1e-6),
        activation=HF_ACTIVATIONS[activation],
        gated_mlp=gate == "gated",
        rope_fraction=0.0,
        query_pre_attn_scalar=1.0,
        tied_head=tied,
        relative_buckets=integer(config, "relative_attention_num_buckets", 32),
        relative_distance=integer(config, "relative_attention_max_distance", 128),
    )
    scaled = bool(get(config, "scale_decoder_outputs", tied))
    start = get(config, "decoder_start_token_id", get(config, "pad_token_id", 0))
    return dataclasses.replace(
        encoder.resized(integer(config, "num_decoder_layers", encoder.num_layers)),
        logit_scale=embed_size**-0.5 if scaled else 1.0,
        encoder=encoder,
        decoder_start=(int(start),),
    )


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The config.json of a `T5ForConditionalGeneration` of this shape."""
    if config.encoder is None:
        raise CheckpointError("a T5 model has an encoder, and this one has none.")
    activation = {"gelu_tanh": "gelu_new"}.get(config.activation, config.activation)
    projection = f"gated-{activation}" if config.gated_mlp else activation
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "vocab_size": config.vocab_size,
        "d_model": config.embed_size,
        "num_layers": config.encoder.num_layers,
        "num_decoder_layers": config.num_layers,
        "num_heads": config.num_heads,
        "d_kv": config.head_dim,
        "d_ff": config.mlp_size,
        "n_positions": config.max_position,
        "layer_norm_epsilon": config.norm_eps,
        "feed_forward_proj": "gated-gelu" if projection == "gated-gelu_new" else projection,
        "relative_attention_num_buckets": config.relative_buckets,
        "relative_attention_max_distance": config.relative_distance,
        "tie_word_embeddings": config.tied_head,
        "scale_decoder_outputs": config.logit_scale != 1.0,
        "decoder_start_token_id": config.decoder_start[0],
        "pad_token_id": config.decoder_start[0],
    }


def _attention(ours: str, theirs: str) -> WeightTable:
    names = {"query": "q", "key": "k", "value": "v", "output": "o"}
    return {f"{ours}.{name}": f"{theirs}.{own}" for name, own in names.items()}


def _stack(ours: str, theirs: str, mlp: int, gated: bool) -> WeightTable:
    """An encoder's or a decoder's weights; `mlp` is the MLP's place in a block."""
    block, own = f"{ours}blocks.{{}}.", f"{theirs}.block.{{}}.layer."
    ups = {"gate": "wi_0", "up": "wi_1"} if gated else {"up": "wi"}
    return {
        **_attention(f"{block}attention", f"{own}0.SelfAttention"),
        f"{ours}relative": f"{theirs}.block.0.layer.0.SelfAttention.relative_attention_bias",
        f"{block}attention_norm": f"{own}0.layer_norm",
        f"{block}mlp_norm": f"{own}{mlp}.layer_norm",
        **{f"{block}mlp.{up}": f"{own}{mlp}.DenseReluDense.{wi}" for up, wi in ups.items()},
        f"{block}mlp.down": f"{own}{mlp}.DenseReluDense.wo",
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
    config_from_hf=config_from_hf,
    hf_weights=_hf_weights,
    config_to_hf=config_to_hf,
    # Copies of the embedding, and a table that old files keep and no model reads.
    buffers=("embed_tokens.weight", "EncDecAttention.relative_attention_bias.weight"),
)
