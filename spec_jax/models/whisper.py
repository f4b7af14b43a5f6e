"""Whisper (arXiv 2212.04356): an encoder of sound, and a decoder of text."""

import dataclasses
from typing import Any

from spec_jax.errors import CheckpointError
from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import (
    Config,
    Family,
    Part,
    WeightTable,
    activation_to_hf,
    hf_activation,
    integer,
    require,
)
from spec_jax.models.gpt2 import hf_tied


def config_from_hf(config: Config) -> TransformerConfig:
    """Translates config.json of a `WhisperForConditionalGeneration`."""
    require(config, "scale_embedding", False, default=False)
    embed_size = integer(config, "d_model")
    stacks = {}
    for name, positions in (("encoder", "source"), ("decoder", "target")):
        num_heads = integer(config, f"{name}_attention_heads")
        stacks[name] = TransformerConfig.of(
            vocab_size=integer(config, "vocab_size"),
            embed_size=embed_size,
            num_layers=integer(config, f"{name}_layers"),
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=embed_size // num_heads,
            mlp_size=integer(config, f"{name}_ffn_dim"),
            max_position=integer(config, f"max_{positions}_positions"),
            norm="layer",
            activation=hf_activation(config, "gelu", key="activation_function"),
            gated_mlp=False,
            learned_positions=True,
            rope_fraction=0.0,
            qkv_bias=True,
            key_bias=False,
            output_bias=True,
            mlp_bias=True,
            tied_head=hf_tied(config),
        )
    return dataclasses.replace(
        stacks["decoder"],
        encoder=dataclasses.replace(stacks["encoder"], mel_bins=integer(config, "num_mel_bins")),
        decoder_start=(integer(config, "decoder_start_token_id"),),
    )


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The config.json of a `WhisperForConditionalGeneration` of this shape."""
    encoder = config.encoder
    if encoder is None:
        raise CheckpointError("a Whisper model has an encoder, and this one has none.")
    stacks = {"encoder": (encoder, "source"), "decoder": (config, "target")}
    sizes: dict[str, Any] = {}
    for name, (stack, positions) in stacks.items():
        sizes |= {
            f"{name}_layers": stack.num_layers,
            f"{name}_attention_heads": stack.num_heads,
            f"{name}_ffn_dim": stack.mlp_size,
            f"max_{positions}_positions": stack.max_position,
        }
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "vocab_size": config.vocab_size,
        "d_model": config.embed_size,
        "num_mel_bins": encoder.mel_bins,
        **sizes,
        "activation_function": activation_to_hf(config),
        "tie_word_embeddings": config.tied_head,
        "decoder_start_token_id": config.decoder_start[0],
        "pad_token_id": config.decoder_start[0],
        "bos_token_id": config.decoder_start[0],
        "eos_token_id": config.decoder_start[0],
        "begin_suppress_tokens": None,
    }


def _attention(ours: str, theirs: str) -> WeightTable:
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}
    return {f"{ours}.{name}": f"{theirs}.{own}" for name, own in names.items()}


def _stack(ours: str, theirs: str) -> WeightTable:
    block, own = f"{ours}blocks.{{}}.", f"{theirs}.layers.{{}}."
    return {
        f"{ours}positions": f"{theirs}.embed_positions",
        **_attention(f"{block}attention", f"{own}self_attn"),
        f"{block}attention_norm": f"{own}self_attn_layer_norm",
        f"{block}mlp_norm": f"{own}final_layer_norm",
        f"{block}mlp.up": f"{own}fc1",
        f"{block}mlp.down": f"{own}fc2",
        f"{ours}final_norm": f"{theirs}.layer_norm",
    }


FAMILY = Family(
    model_type="whisper",
    config_from_hf=config_from_hf,
    hf_weights={
        "embed": "model.decoder.embed_tokens",
        "encoder.first": Part("model.encoder.conv1", taps=3),
        "encoder.second": Part("model.encoder.conv2", taps=3),
        **_stack("encoder.", "model.encoder"),
        **_stack("", "model.decoder"),
        "blocks.{}.cross_norm": "model.decoder.layers.{}.encoder_attn_layer_norm",
        **_attention("blocks.{}.cross", "model.decoder.layers.{}.encoder_attn"),
        "head": "proj_out",
    },
    config_to_hf=config_to_hf,
)
