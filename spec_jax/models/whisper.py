"""Whisper (arXiv 2212.04356): an encoder of audio, and a decoder of text."""

import dataclasses
from typing import Any

from spec_jax.errors import CheckpointError
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
from spec_jax.models.opt import PROJECTIONS, stack_weights


def _names(stack: str, positions: str) -> dict[str, str]:
    return {
        "vocab_size": "vocab_size",
        "embed_size": "d_model",
        "num_layers": f"{stack}_layers",
        "num_heads": f"{stack}_attention_heads",
        "mlp_size": f"{stack}_ffn_dim",
        "max_position": f"max_{positions}_positions",
        "activation": "activation_function",
        "tied_head": "tie_word_embeddings",
    }


_ENCODER, _DECODER = _names("encoder", "source"), _names("decoder", "target")


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `WhisperForConditionalGeneration`."""
    require(config, "scale_embedding", False, default=False)
    encoder, decoder = (
        TransformerConfig.of(
            **read_fields(config, names, activation="gelu", tied_head=True),
            **BIASED,
            **LEARNED,
            key_bias=False,
        )
        for names in (_ENCODER, _DECODER)
    )
    return dataclasses.replace(
        decoder,
        encoder=dataclasses.replace(encoder, mel_bins=integer(config, "num_mel_bins")),
        decoder_start=(integer(config, "decoder_start_token_id"),),
    )


def fields_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The inverse of `config_from_hf`."""
    if config.encoder is None:
        raise CheckpointError("a Whisper model has an encoder, and this one has none.")
    return {
        **write_fields(config.encoder, _ENCODER),
        **write_fields(config, _DECODER),
        "is_encoder_decoder": True,
        "num_mel_bins": config.encoder.mel_bins,
        "decoder_start_token_id": config.decoder_start[0],
        "pad_token_id": config.decoder_start[0],
        "bos_token_id": config.decoder_start[0],
        "eos_token_id": config.decoder_start[0],
        "begin_suppress_tokens": None,
    }


def _stack(ours: str, theirs: str) -> WeightTable:
    return {
        f"{ours}positions": f"{theirs}.embed_positions",
        **stack_weights(ours, theirs),
        f"{ours}final_norm": f"{theirs}.layer_norm",
    }


FAMILY = Family(
    model_type="whisper",
    hf_class="WhisperForConditionalGeneration",
    config_from_hf=config_from_hf,
    fields_to_hf=fields_to_hf,
    hf_weights={
        "embed": "model.decoder.embed_tokens",
        "encoder.first": Part("model.encoder.conv1", taps=3),
        "encoder.second": Part("model.encoder.conv2", taps=3),
        **_stack("encoder.", "model.encoder"),
        **_stack("", "model.decoder"),
        "blocks.{}.cross_norm": "model.decoder.layers.{}.encoder_attn_layer_norm",
        **attention_names("blocks.{}.cross", "model.decoder.layers.{}.encoder_attn", PROJECTIONS),
        "head": "proj_out",
    },
)
