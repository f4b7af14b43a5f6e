"""Tiny models of every family, made by transformers with random weights; each option occurs."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from spec_jax import checkpoints
from spec_jax.models.model import Model
from spec_jax.models.source import EncoderInput
from tests import speech
from tests.checkpoints.tiny import write_tokenizer

if TYPE_CHECKING:
    import torch
    import transformers

SHAPE = dict(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=128,
)
GQA = dict(SHAPE, num_key_value_heads=2)
OPT = {name: value for name, value in SHAPE.items() if name != "intermediate_size"}
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = dict(rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=32)
LONGROPE = dict(
    rope_type="longrope",
    rope_theta=500.0,
    short_factor=[1.0, 1.2, 1.7, 2.0],
    long_factor=[1.3, 2.0, 4.0, 9.0],
)
GPT2 = dict(vocab_size=300, n_embd=32, n_layer=3, n_head=4, n_positions=128)
FALCON = dict(
    vocab_size=300,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    ffn_hidden_size=48,
    max_position_embeddings=128,
)
QWEN3_MOE = dict(GQA, head_dim=16, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20)
GEMMA = dict(GQA, head_dim=16, num_hidden_layers=4, sliding_window=5, query_pre_attn_scalar=20)
GEMMA_ROPE = dict(
    full_attention=dict(rope_type="linear", rope_theta=5000.0, factor=4.0),
    sliding_attention=dict(rope_type="default", rope_theta=50.0),
)
MODELS: dict[str, tuple[str, dict]] = {
    "llama": ("Llama", GQA),
    "llama, tied": ("Llama", dict(GQA, tie_word_embeddings=True)),
    "llama, scaled positions": ("Llama", dict(GQA, rope_parameters=LLAMA3_ROPE)),
    "llama, all positions scaled": (
        "Llama",
        dict(GQA, rope_parameters=dict(rope_type="linear", rope_theta=500.0, factor=4.0)),
    ),
    "llama, YaRN": ("Llama", dict(GQA, rope_parameters=YARN)),
    "llama, YaRN with an amplitude of its own": (
        "Llama",
        dict(GQA, rope_parameters=dict(YARN, attention_factor=1.3, truncate=False, beta_fast=8)),
    ),
    "llama, LongRoPE": (
        "Llama",
        dict(GQA, rope_parameters=dict(LONGROPE, original_max_position_embeddings=8)),
    ),
    "llama, scaled past the context": (
        "Llama",
        dict(GQA, rope_parameters=dict(rope_type="dynamic", rope_theta=500.0, factor=4.0)),
    ),
    "llama, biases and wide heads": (
        "Llama",
        dict(GQA, attention_bias=True, mlp_bias=True, head_dim=10, hidden_act="gelu"),
    ),
    "mistral": ("Mistral", dict(GQA, sliding_window=None, head_dim=12)),
    "mistral, a window": ("Mistral", dict(GQA, sliding_window=5)),
    "mixtral": ("Mixtral", dict(GQA, num_local_experts=5)),
    "mixtral, a window, one of three": (
        "Mixtral",
        dict(GQA, sliding_window=5, num_local_experts=3, num_experts_per_tok=1),
    ),
    "qwen2": ("Qwen2", dict(GQA, tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(GQA, head_dim=16)),
    "qwen3_moe": ("Qwen3Moe", QWEN3_MOE),
    "qwen3_moe, dense layers, other weights": (
        "Qwen3Moe",
        dict(
            QWEN3_MOE,
            decoder_sparse_step=2,
            mlp_only_layers=[3],
            num_hidden_layers=6,
            norm_topk_prob=True,
            attention_bias=True,
        ),
    ),
    "gemma3_text": ("Gemma3", dict(GEMMA, sliding_window_pattern=2, rope_parameters=GEMMA_ROPE)),
    "gemma3_text, no global layer, own head": (
        "Gemma3",
        dict(GEMMA, tie_word_embeddings=False, hidden_activation="gelu", num_key_value_heads=1),
    ),
    "gpt_neox": ("GPTNeoX", SHAPE),
    "gpt_neox, sequential": ("GPTNeoX", dict(SHAPE, use_parallel_residual=False)),
    "gpt_neox, half rotated, other gelu": (
        "GPTNeoX",
        dict(SHAPE, rotary_pct=0.5, hidden_act="gelu_new", attention_bias=False),
    ),
}
MODELS |= {
    "bloom": ("Bloom", dict(vocab_size=300, hidden_size=32, n_layer=3, n_head=4, seq_length=128)),
    "bloom, six heads": (
        "Bloom",
        dict(vocab_size=300, hidden_size=48, n_layer=2, n_head=6, seq_length=128),
    ),
    "codegen": ("CodeGen", dict(GPT2, rotary_dim=4)),
    "codegen, other widths": ("CodeGen", dict(GPT2, rotary_dim=8, n_inner=40)),
    "falcon": ("Falcon", FALCON),
    "falcon, new": ("Falcon", dict(FALCON, new_decoder_architecture=True, num_kv_heads=2)),
    "falcon, new, one norm": (
        "Falcon",
        dict(FALCON, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    ),
    "falcon, sequential, ALiBi": (
        "Falcon",
        dict(FALCON, alibi=True, multi_query=False, parallel_attn=False, bias=True),
    ),
    "gemma2": (
        "Gemma2",
        dict(GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    ),
    "gemma2, no caps": (
        "Gemma2",
        dict(GEMMA, attn_logit_softcapping=None, final_logit_softcapping=None),
    ),
    "gemma": ("Gemma", dict(GQA, head_dim=16)),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2, other widths": (
        "GPT2LMHeadModel",
        dict(GPT2, n_inner=40, activation_function="relu", tie_word_embeddings=False),
    ),
    "gpt_bigcode": ("GPTBigCode", GPT2),
    "gpt_bigcode, all heads": ("GPTBigCode", dict(GPT2, multi_query=False)),
    "granite": (
        "Granite",
        dict(
            GQA,
            attention_multiplier=0.3,
            embedding_multiplier=3.0,
            residual_multiplier=0.4,
            logits_scaling=0.5,
            attention_bias=True,
            mlp_bias=True,
        ),
    ),
    "olmo2": ("Olmo2", dict(GQA, attention_bias=True)),
    "opt": ("OPT", dict(OPT, ffn_dim=48, word_embed_proj_dim=32)),
    "opt, another activation": (
        "OPT",
        dict(OPT, ffn_dim=40, word_embed_proj_dim=32, activation_function="gelu"),
    ),
    "phi3": ("Phi3", dict(GQA, pad_token_id=0)),
    "phi3, LongRoPE": (
        "Phi3",
        dict(GQA, pad_token_id=0, original_max_position_embeddings=16, rope_parameters=LONGROPE),
    ),
    "phi3, a window, half rotated": (
        "Phi3",
        dict(GQA, pad_token_id=0, sliding_window=5, partial_rotary_factor=0.5),
    ),
    "smollm3": ("SmolLM3", dict(GQA, pad_token_id=0, no_rope_layer_interval=2)),
    "smollm3, all rotated": ("SmolLM3", dict(GQA, pad_token_id=0, no_rope_layers=[1, 1, 1])),
    "stablelm": ("StableLm", dict(GQA, use_qkv_bias=True)),
    "stablelm, parallel, wholly rotated": (
        "StableLm",
        dict(GQA, use_parallel_residual=True, partial_rotary_factor=1.0),
    ),
    "starcoder2": ("Starcoder2", GQA),
    "starcoder2, a window, no biases": ("Starcoder2", dict(GQA, sliding_window=5, use_bias=False)),
}
T5 = dict(
    vocab_size=300,
    d_model=32,
    d_kv=10,
    d_ff=48,
    num_layers=3,
    num_heads=4,
    decoder_start_token_id=0,
)
ENCODER_DECODERS: dict[str, tuple[str, dict]] = {
    "t5": ("T5", T5),
    "t5, gated, its own head, fewer decoder layers": (
        "T5",
        dict(T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False, num_decoder_layers=2),
    ),
    "t5, few buckets, gated silu": (
        "T5",
        dict(
            T5,
            feed_forward_proj="gated-silu",
            relative_attention_num_buckets=8,
            relative_attention_max_distance=20,
        ),
    ),
}
WHISPER = dict(
    vocab_size=300,
    num_mel_bins=12,
    d_model=32,
    encoder_layers=2,
    decoder_layers=3,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=40,
    max_source_positions=35,
    max_target_positions=128,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 1),
    decoder_start_token_id=1,
    begin_suppress_tokens=None,
)
ENCODER_DECODERS |= {
    "whisper": ("Whisper", WHISPER),
    "whisper, its own head, other heads": (
        "Whisper",
        dict(WHISPER, tie_word_embeddings=False, encoder_attention_heads=2),
    ),
}


def make(name: str, path: Path) -> tuple["transformers.PreTrainedModel", Model]:
    """A random torch model, saved, and ours loaded from what it saved."""
    import transformers

    kind, options = {**MODELS, **ENCODER_DECODERS}[name]
    task = "ForConditionalGeneration" if name in ENCODER_DECODERS else "ForCausalLM"
    architecture = getattr(transformers, kind if "Head" in kind else f"{kind}{task}")
    return saved(architecture, options, path)


def saved(
    architecture: Any, options: dict, path: Path
) -> tuple["transformers.PreTrainedModel", Model]:
    """As `make`, of a class of transformers and its configuration."""
    import torch

    torch.manual_seed(0)
    config = architecture.config_class(**options)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):  # by default as in the release
        if (getattr(config, name, None) or 0) >= config.vocab_size:
            setattr(config, name, 1)
    reference = architecture(config)
    reference.eval()
    with torch.no_grad():  # norms and biases must matter too
        for weight in reference.parameters():
            weight.copy_(torch.randn_like(weight) * (0.25 if weight.ndim == 2 else 0.5))
        if architecture.__name__.startswith("T5"):  # whose tied head makes logits small
            reference.decoder.final_layer_norm.weight.mul_(6)
    reference.save_pretrained(path)
    write_tokenizer(path)
    if architecture.__name__.startswith("Whisper"):  # whose tokenizer needs its special tokens
        speech.tokenizer().save(str(path / "tokenizer.json"))
    return reference, checkpoints.load(path).model


def with_sources(
    reference: "transformers.PreTrainedModel", model: Model
) -> tuple[EncoderInput, Callable[["torch.Tensor"], Any]]:
    """Three ragged sources, or sounds, for an encoder-decoder, and the torch model given them."""
    import torch

    random = np.random.default_rng(2)
    sizes, options = np.array([70, 1, 33]), {}
    if bins := model.config.encoder.mel_bins:  # sounds are padded with silence to one length
        sources = random.normal(size=(3, 70, bins)).astype(np.float32)
        sizes, theirs = np.array([35] * 3), sources.swapaxes(1, 2)
    else:
        sources = theirs = random.integers(0, model.config.vocab_size, (3, 70))
        options = {"attention_mask": torch.tensor(np.arange(70)[None] < sizes[:, None])}

    def logits(rows: "torch.Tensor") -> Any:
        values = torch.tensor(theirs)
        if values.is_floating_point():
            values = values.to(next(reference.parameters()).dtype)
        return reference(values, decoder_input_ids=rows, **options)

    return EncoderInput(jnp.asarray(sources), jnp.asarray(sizes, jnp.int32)), logits
