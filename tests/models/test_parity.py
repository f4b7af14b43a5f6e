"""Logits of every family agree with Hugging Face's torch model on the same weights."""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import checkpoints
from spec_jax.checkpoints.hf_writer import write_model
from spec_jax.checkpoints.safetensors_files import SafetensorsFiles
from spec_jax.models.cache import Encoded, KVCache
from spec_jax.models.layers import relative_buckets
from spec_jax.models.model import Model
from spec_jax.models.registry import FAMILIES
from spec_jax.models.source import Source
from tests import speech
from tests.checkpoints.tiny import write_tokenizer
from tests.prompts import COPY_PROMPTS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.torch
load_llama = pytest.importorskip("tests.torch_reference").load_llama

SHAPE = dict(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=128,
)
GQA = dict(SHAPE, num_key_value_heads=2)
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
    "opt": ("OPT", dict(SHAPE, ffn_dim=48, word_embed_proj_dim=32)),
    "opt, another activation": (
        "OPT",
        dict(SHAPE, ffn_dim=40, word_embed_proj_dim=32, activation_function="gelu"),
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
TOLERANCE = 1e-4


def make(name: str, path: Path) -> tuple["torch.nn.Module", Model]:
    """A random torch model, saved, and ours loaded from what it saved."""
    kind, options = MODELS[name]
    architecture = getattr(transformers, kind if "Head" in kind else f"{kind}ForCausalLM")
    return _saved(architecture, options, path)


def _saved(architecture: Any, options: dict, path: Path) -> tuple["torch.nn.Module", Model]:
    torch.manual_seed(0)
    reference = architecture(architecture.config_class(**options))
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


def test_every_family_is_compared():
    names = {name.split(",")[0] for name in {**MODELS, **ENCODER_DECODERS}}
    assert names == {family.model_type for family in FAMILIES}


def make_encoder_decoder(name: str, path: Path) -> tuple["torch.nn.Module", Model]:
    kind, options = ENCODER_DECODERS[name]
    architecture = getattr(transformers, f"{kind}ForConditionalGeneration")
    return _saved(architecture, options, path)


@pytest.mark.parametrize("name", ENCODER_DECODERS)
@pytest.mark.parametrize("attention", ["dense", "blocked"])
def test_sources_and_texts(name, attention, tmp_path):
    """Ragged sources; a text at once, and step by step from ragged lengths."""
    reference, model = make_encoder_decoder(name, tmp_path)
    model = dataclasses.replace(model, attention=attention)
    random, vocab = np.random.default_rng(1), model.config.vocab_size
    sources, sizes = random.integers(0, vocab, (3, 70)), np.array([70, 1, 33])
    rows, options = random.integers(0, vocab, (3, 45)), {}
    if model.config.encoder.mel_bins:  # all sounds are padded with silence to the same length
        frames = random.normal(size=(3, 70, model.config.encoder.mel_bins)).astype(np.float32)
        sources, sizes, theirs = frames, np.array([35] * 3), frames.swapaxes(1, 2)
    else:
        theirs = sources
        options = {"attention_mask": torch.tensor(np.arange(70)[None] < sizes[:, None])}

    def torch_logits(rows: "torch.Tensor"):
        return reference(torch.tensor(theirs), decoder_input_ids=rows, **options)

    source = Source(jnp.asarray(sources), jnp.asarray(sizes, jnp.int32))
    encoded, _ = jax.jit(lambda model, source: model.encode(source))(model, source)
    assert_parity(model, torch_logits, rows, lengths=(5, 44, 1), encoded=encoded)


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_transformers_reads_encoder_decoders(name, tmp_path):
    reference, model = make_encoder_decoder(name, tmp_path / "theirs")
    write_model(tmp_path / "ours", model, "float32")
    again = type(reference).from_pretrained(tmp_path / "ours").eval()
    tokens = torch.tensor(np.random.default_rng(1).integers(0, model.config.vocab_size, (2, 17)))
    bins = model.config.encoder.mel_bins
    source = torch.randn(2, bins, 70) if bins else tokens.flip(1)
    with torch.no_grad():
        expected, found = (
            each(source, decoder_input_ids=tokens).logits.numpy() for each in (reference, again)
        )
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


def test_t5_sorts_distances_into_the_same_buckets():
    theirs = transformers.models.t5.modeling_t5.T5Attention._relative_position_bucket
    for buckets, most, causal in itertools.product((8, 32, 64), (20, 128, 1000), (True, False)):
        behind = torch.arange(-most, most + 1)
        expected = theirs(-behind, bidirectional=not causal, num_buckets=buckets, max_distance=most)
        assert relative_buckets(buckets, most, causal=causal) == tuple(expected.tolist())


@pytest.mark.parametrize("name", MODELS)
def test_prompt_and_steps(name, tmp_path):
    reference, model = make(name, tmp_path)
    rows = np.random.default_rng(1).integers(0, model.config.vocab_size, (3, 17))
    assert_parity(model, reference, rows, lengths=(5, 9, 1))


@pytest.mark.parametrize("context", [32, 33, 128])
def test_longrope_chooses_by_the_context(context, tmp_path):
    """transformers chooses by the text: ours is the same where text and context are on one side."""
    options = dict(GQA, pad_token_id=0, original_max_position_embeddings=32)
    reference, model = _saved(
        transformers.Phi3ForCausalLM, dict(options, rope_parameters=LONGROPE), tmp_path
    )
    model, length = model.within(context), 32 if context == 32 else 40
    rows = np.random.default_rng(1).integers(0, model.config.vocab_size, (3, length))
    assert_parity(model, reference, rows, lengths=(30, 9, 31))
    with torch.no_grad():  # what the other factors say
        longer = np.concatenate([rows, rows], axis=1)
        others = reference(torch.tensor(longer if context == 32 else rows[:, :32]))
    found, _ = score(model, jnp.asarray(rows[:, :32], jnp.int32), model.new_cache(3, 32))
    assert np.abs(found - others.logits.numpy()[:, :32]).max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe, dense layers, other weights"])
def test_experts_in_one_tensor(name, tmp_path):
    """transformers 5 splits the experts when it saves, unless it is told to keep its own format."""
    reference, model = make(name, tmp_path / "apart")
    reference.save_pretrained(tmp_path / "together", save_original_format=False)
    write_tokenizer(tmp_path / "together")
    names = SafetensorsFiles(tmp_path / "together").shapes
    assert any(name.endswith("experts.gate_up_proj") for name in names)
    found = checkpoints.load(tmp_path / "together").model
    assert found.config == model.config
    for name, weight in found.weights.items():
        np.testing.assert_array_equal(weight, model.weights[name])


@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_what_is_written(name, tmp_path):
    """As this family, or as another one that has the same shape."""
    reference, model = make(name, tmp_path / "theirs")
    write_model(tmp_path / "ours", model, "float32")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    tokens = torch.tensor(np.random.default_rng(1).integers(0, model.config.vocab_size, (2, 17)))
    with torch.no_grad():
        expected, found = (each(tokens).logits.numpy() for each in (reference, again))
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


@jax.jit
def score(model, tokens, cache):
    return model.score(tokens, cache)


def assert_parity(
    model: Model,
    reference: Callable,
    rows: np.ndarray,
    *,
    lengths: tuple[int, ...],
    encoded: Encoded | None = None,
) -> None:
    """Compares whole rows' logits, and those of single steps from ragged lengths."""
    total = rows.shape[1]
    with torch.no_grad():
        expected = reference(torch.tensor(rows)).logits.numpy()
    assert expected.std() > 0.5, "the comparison means little with logits this small"

    def new_cache(capacity: int) -> KVCache:
        cache = model.new_cache(len(lengths), capacity)
        return dataclasses.replace(cache, encoded=encoded)

    logits, _ = score(model, jnp.asarray(rows, jnp.int32), new_cache(total))
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0)

    # Every row starts from its own length; what was written past it must not be seen.
    prompt = jnp.asarray(rows[:, : max(lengths)], jnp.int32)
    _, cache = score(model, prompt, new_cache(total + 1))
    at, which = np.asarray(lengths), np.arange(len(lengths))
    while (at < total).any():
        here = np.minimum(at, total - 1)
        cache = cache.with_lengths(jnp.asarray(here, jnp.int32))
        tokens = jnp.asarray(rows[which, here][:, None], jnp.int32)
        logits, cache = score(model, tokens, cache)
        np.testing.assert_allclose(logits[:, 0], expected[which, here], atol=TOLERANCE, rtol=0)
        at = at + 1


@pytest.mark.weights
def test_demo_model(demo_recipe):
    """SmolLM2-135M-Instruct: torch reads the same GGUF file."""
    _, path = checkpoints.locate(demo_recipe, print)
    reference = load_llama(path)
    checkpoint = checkpoints.load(demo_recipe)
    rows = np.array([checkpoint.tokenizer.encode(text)[:20] for text in COPY_PROMPTS[:3]])
    model, tokens = checkpoint.model, jnp.asarray(rows, jnp.int32)
    ours = np.asarray(score(model, tokens, model.new_cache(*rows.shape))[0])
    with torch.no_grad():
        theirs = reference(torch.tensor(rows)).logits.numpy()
    # This model's residual stream reaches 25,000, so that rounding it alone moves logits by up to
    # 5e-5, and two float32 programs may both be right and 1e-4 apart. Float64 is the judge.
    assert (np.abs(ours - theirs) < TOLERANCE).mean() > 0.9999
    np.testing.assert_allclose(ours, theirs, atol=2 * TOLERANCE, rtol=0)
    assert_parity(model, reference.double(), rows, lengths=(5, 12, 1))
