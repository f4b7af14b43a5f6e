"""Caches in 8 bits: what they keep, and that speculation over them is exact."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import LLM, ConfigError, SamplingParams, SpeculativeConfig
from spec_jax.models.attention import attention
from spec_jax.models.attention_mask import AttentionMask, ScoreOptions
from spec_jax.models.cache import Int8KV, StateSize
from spec_jax.models.config import TransformerConfig
from spec_jax.models.mixers import new_cache
from spec_jax.testing import tiny_model
from tests.checkpoints.tiny import CONFIG, llama_tensors, write_directory
from tests.harness import make_engine, request, run
from tests.often import often

SHAPE = TransformerConfig.of(
    vocab_size=4,
    embed_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    mlp_size=4,
    max_position=512,
    sliding_window=20,
)
METHODS = ("other", "tree", "lookup_tree", "early_exit", "universal_vocabulary")


def test_numbers_are_kept_to_half_a_step():
    x = np.random.default_rng(0).normal(size=(3, 2, 50, 16)) * np.logspace(-20, 20, 50)[:, None]
    rounded = jax.jit(Int8KV.of)(jnp.asarray(x, jnp.float32))
    assert rounded.values.dtype == jnp.int8 and rounded.scales.shape == (3, 2, 50, 1)
    steps = np.abs(x).max(-1, keepdims=True) / 127
    assert (np.abs(np.asarray(rounded.to_float32()) - x) <= 0.5001 * steps).all()
    again = jax.jit(lambda rounded: Int8KV.of(rounded.to_float32()))(rounded)
    np.testing.assert_array_equal(again.values, rounded.values)


def test_zeros_stay_zeros_and_a_nan_spoils_its_own_head_alone():
    x = np.ones((1, 2, 3, 16), np.float32)
    x[0, 0, 1, 4], x[0, 1, 2] = np.nan, 0.0
    wide = np.asarray(Int8KV.of(jnp.asarray(x)).to_float32())
    assert np.isnan(wide[0, 0, 1]).all() and np.isnan(wide).sum() == 16
    assert (wide[0, 1, 2] == 0).all() and (wide[0, 0, 0] == 1).all()


@pytest.mark.parametrize("backend", ["dense", "blocked"])
@pytest.mark.parametrize("headroom", [None, 44], ids=["full", "ring"])
def test_attention_reads_what_is_kept(backend, headroom):
    """Against float64 on the rounded keys and values, token by token over several blocks."""
    random, total = np.random.default_rng(1), 100
    q, k, v = random.normal(size=(3, total, 2, 16)).astype(np.float32)
    cache = new_cache(SHAPE, StateSize(1, 256, jnp.int8, headroom))
    layer = cache.layers[0]
    assert layer.ring == (headroom is not None)
    step = jax.jit(
        lambda layer, lengths, *new: attention(
            *new,
            layer,
            AttentionMask.following(cache.with_lengths(lengths), 1),
            ScoreOptions(16.0, window=20),
            backend=backend,
        )
    )
    keys, values = (
        np.asarray(Int8KV.of(jnp.asarray(each)[None].swapaxes(1, 2)).to_float32(), np.float64)[0]
        for each in (k, v)
    )
    for t in range(total):
        new = (jnp.asarray(each[None, t : t + 1]) for each in (q, k, v))
        out, layer = step(layer, jnp.full((1,), t, jnp.int32), *new)
        seen = slice(max(0, t - 19), t + 1)
        for head in range(2):
            scores = keys[head, seen] @ q[t, head].astype(np.float64) / 4.0
            weights = np.exp(scores - scores.max())
            expected = weights @ values[head, seen] / weights.sum()
            np.testing.assert_allclose(out[0, 0, head], expected, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("method", often(METHODS, ["lookup_tree"]))
def test_every_method_says_what_plain_decoding_says(method):
    target, draft = (dataclasses.replace(tiny_model(seed), rounds_cache=True) for seed in range(2))
    params = SamplingParams(max_tokens=40, repetition_penalty=1.3)
    requests = [request(each, params) for each in ([1, 2, 3], [4, 5, 4, 5, 4], [7] * 20)]
    expected = run(make_engine("none", target), requests)
    assert run(make_engine(method, target, draft), requests) == expected


@pytest.mark.slow
def test_the_option(tmp_path):
    model = write_directory(tmp_path / "model", CONFIG, llama_tensors(CONFIG))
    llm = LLM(model, kv_cache_dtype="int8", max_model_len=128)
    cache = llm.engine.target.new_cache(1, 128)
    assert isinstance(cache.layers[0].keys, Int8KV)
    plain = llm.generate("abc", SamplingParams(max_tokens=20))[0].token_ids
    lookup = SpeculativeConfig(method="prompt_lookup", num_speculative_tokens=3)
    outputs = llm.with_speculation(lookup).generate("abc", SamplingParams(max_tokens=20))
    assert outputs[0].token_ids == plain
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is 'int4'\. Did you mean 'int8'"):
        LLM(model, kv_cache_dtype="int4")
