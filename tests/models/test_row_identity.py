"""Products in 8-bit activations: a token's logits are the same, bit for bit, in calls of any shape.

So greedy speculation equals plain decoding, with no near-ties. docs/quantization.md says where.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.checkpoints.packing import Packing
from spec_jax.checkpoints.weights import ArrayWeights
from spec_jax.config import SamplingParams
from spec_jax.decoding import score as score_module
from spec_jax.models.config import TransformerConfig
from spec_jax.models.model import Model
from tests.harness import make_engine, request, run
from tests.often import often

pytestmark = pytest.mark.native

TOKENS, ROWS, VOCAB = 24, 8, 96
SHAPE = {
    "vocab_size": VOCAB,
    "embed_size": 64,
    "num_layers": 2,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 8,
    "mlp_size": 96,
    "max_position": 128,
}
MODELS = {
    "llama": {},
    "layer norms, biases, learned positions": {
        "norm": "layer",
        "qkv_bias": True,
        "output_bias": True,
        "learned_positions": True,
    },
    "norms of heads and after blocks": {"qk_norm": "head", "post_norms": True},
    "capped scores": {"score_cap": 5.0},
    "falling scores": {"alibi_scale": 1.0},
    "window": {"sliding_window": 7},
    "odd widths": {"embed_size": 72, "mlp_size": 100},
}


@functools.cache
def packed(name, quantization):
    """A model with random weights, each in the same numbers of bits."""
    model = Model.random(TransformerConfig.of(**SHAPE | MODELS[name]), seed=3)
    packing = Packing(quantization, native=True, activations="int8")
    return model.with_weights(ArrayWeights(model, packing).read(model.weights))


@jax.jit
def score(model, tokens, cache):
    out = model.score(tokens, cache)
    return out.logits, out.cache.commit(cache.lengths + tokens.shape[1])


def logits_of(model, texts, width):
    """Logits [rows, tokens, V] of texts that are read `width` tokens at a time."""
    cache, parts = model.new_cache(len(texts), 64, headroom=TOKENS), []
    for at in range(0, TOKENS // width * width, width):
        logits, cache = score(model, jnp.asarray(texts[:, at : at + width]), cache)
        parts.append(np.asarray(logits))
    return np.concatenate(parts, 1)


CASES = [(name, quantization) for name in MODELS for quantization in ("int8", "int4")]


@pytest.mark.parametrize(("name", "quantization"), often(CASES, [CASES[0], *CASES[3::4]]))
def test_logits_depend_on_no_other_token_of_the_call(name, quantization):
    model = packed(name, quantization)
    texts = np.random.default_rng(5).integers(0, VOCAB, (ROWS, TOKENS)).astype(np.int32)
    alone = np.concatenate([logits_of(model, texts[row : row + 1], 1) for row in range(ROWS)])
    for rows, width in [(1, 2), (1, 5), (1, 9), (1, 24), (2, 4), (3, 1), (8, 1), (8, 6)]:
        together = logits_of(model, texts[:rows], width)
        expected = alone[:rows, : together.shape[1]]
        assert together.tobytes() == expected.tobytes(), (rows, width)
    assert len(np.unique(alone.argmax(-1))) > 1


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_tokens", [[6, 6, 6], [1, 0, 4], [0, 0, 2]])
def test_padding_changes_no_number_and_is_neither_written_nor_scored(name, num_tokens):
    model = packed(name, "int8")
    tokens = np.random.default_rng(2).integers(0, VOCAB, (3, 10 + 6))
    text, new = jnp.asarray(tokens[:, :10]), jnp.asarray(tokens[:, 10:])
    cache = score(model, text, model.new_cache(3, TOKENS))[1]
    whole, _ = score(model, new, cache)
    call = jax.jit(lambda *args: model.score(*args[:2], num_tokens=args[2]))
    out = call(new, cache, jnp.asarray(num_tokens, jnp.int32))
    is_real = np.arange(6)[None] < np.array(num_tokens)[:, None]
    np.testing.assert_array_equal(out.logits[is_real], whole[is_real])
    before, after = (jax.tree.leaves(each.layers) for each in (cache, out.cache))
    for old, now in zip(before, after, strict=True):
        for row, count in enumerate(num_tokens):
            np.testing.assert_array_equal(old[row, :, 10 + count :], now[row, :, 10 + count :])
            assert count == 0 or np.any(old[row, :, 10] != now[row, :, 10])


@pytest.mark.parametrize("verification", ["token", "block", "coupled"])
def test_what_is_not_scored_may_hold_anything(monkeypatch, verification):
    """Rows whose drafts differ in length: places after a draft hold no distribution at all."""
    target = packed("llama", "int8")
    assert target.skips_padding
    params = SamplingParams(temperature=1.0, max_tokens=30)
    prompts = [[1, 2, 3, 4, 5, 1, 2], [7, 7, 7, 7], [9, 40, 3]]
    requests = [request(prompt, params, seed=i) for i, prompt in enumerate(prompts)]
    expected = run(make_engine("prompt_lookup", target, verification=verification), requests)
    of_all = score_module.probabilities

    def probabilities_and_noise(*arguments):
        probs, num_tokens = of_all(*arguments), arguments[-1]
        places = jnp.arange(probs.shape[1], dtype=jnp.int32)[None]
        return jnp.where((places < num_tokens[:, None])[..., None], probs, jnp.nan)

    monkeypatch.setattr(score_module, "probabilities", probabilities_and_noise)
    noisy = make_engine("prompt_lookup", target, verification=verification)
    assert run(noisy, requests) == expected
