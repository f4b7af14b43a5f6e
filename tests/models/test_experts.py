"""Sparse MLPs: only the chosen experts are read, and no token depends on another one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.checkpoints.packing import Packing
from spec_jax.checkpoints.weights import ArrayWeights
from spec_jax.models.attention_mask import AttentionMask
from spec_jax.models.config import Experts, TransformerConfig
from spec_jax.models.context import LayerContext, score_options
from spec_jax.models.model import Model
from spec_jax.sharding import Layout, Placement, Rule
from tests import quick
from tests.often import often
from tests.planning.program_text import elements_read

CONFIG = TransformerConfig.of(
    vocab_size=64,
    embed_size=32,
    num_layers=3,
    num_heads=8,
    num_kv_heads=8,
    head_dim=8,
    mlp_size=64,
    max_position=128,
    experts=Experts(count=8, per_token=2, size=96),
    dense_layers=(1,),
)
MODEL = Model.random(CONFIG)
CONTEXT = LayerContext(
    AttentionMask.bidirectional(jnp.array([40]), 40),
    None,
    score_options(CONFIG),
    None,
    Placement.single_device(),
    None,
)
TOKENS = np.random.default_rng(0).integers(0, 64, (8, 9)).astype(np.int32)


@jax.jit
def score(model, tokens):
    return model.score(tokens, model.new_cache(tokens.shape[0], 32))[0]


@pytest.fixture(scope="module")
def expected():
    return np.asarray(score(MODEL, TOKENS))


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_layers_are_sparse_unless_they_are_said_to_be_dense():
    shapes = {name: weight.shape for name, weight in MODEL.weights.items()}
    assert shapes["blocks.0.mlp.router.weight"] == (32, 8)
    assert shapes["blocks.2.mlp.expert_down.weight"] == (8, 96, 32)
    assert shapes["blocks.1.mlp.up.weight"] == (32, 64)
    random = Model.random(CONFIG, seed=1)
    assert jax.tree.structure(random.params) == jax.tree.structure(MODEL.params)
    assert random.graphdef == Model.abstract(CONFIG, dtype="float32").graphdef


def test_logits_by_definition(expected):
    """A sparse layer by its definition in float64, one token at a time, in the place of ours."""

    def by_definition(mlp, x):
        router, gate, up, down = (
            np.asarray(layer.weight[...], np.float64)
            for layer in (mlp.router, mlp.expert_gate, mlp.expert_up, mlp.expert_down)
        )
        rows = np.asarray(x, np.float64)
        out = np.zeros_like(rows)
        for i, row in enumerate(rows):
            scores = np.exp(row @ router)
            chosen = np.argsort(-scores)[: CONFIG.experts.per_token]
            for expert in chosen:
                hidden = row @ gate[expert]
                hidden = hidden / (1 + np.exp(-hidden)) * (row @ up[expert])
                share = scores[expert] / scores[chosen if CONFIG.experts.normed else ...].sum()
                out[i] += share * (hidden @ down[expert])
        return out

    block = MODEL.module.blocks[2]
    x = np.random.default_rng(1).normal(size=(40, 32)).astype(np.float32)
    actual = jax.jit(lambda x: block.mlp(x[None], CONTEXT)[0])(x)
    np.testing.assert_allclose(actual, by_definition(block.mlp, x), atol=1e-5)


def test_a_token_does_not_depend_on_its_neighbours(expected):
    for row in (0, 3):
        close(score(MODEL, TOKENS[row : row + 1])[0], expected[row])
    alike = np.repeat(TOKENS[:1], 8, axis=0)  # all want the same experts
    close(score(MODEL, alike), np.repeat(expected[:1], 8, axis=0))
    # Tokens that are read later change nothing, and rows that are read apart are the same.
    prompt, cache = TOKENS[:2, :5], MODEL.new_cache(2, 32)
    first, _, cache = jax.jit(lambda m, t, c: m.score(t, c))(MODEL, prompt, cache)
    cache = cache.with_lengths(jnp.full((2,), 5, jnp.int32))
    later, *_ = jax.jit(lambda m, t, c: m.score(t, c))(MODEL, TOKENS[:2, 5:], cache)
    close(np.concatenate([first, later], axis=1), expected[:2])


def test_a_neighbour_that_is_not_a_number_does_not_matter():
    mlp = MODEL.module.blocks[0].mlp
    x = np.random.default_rng(1).normal(size=(12, 32)).astype(np.float32)
    damaged = x.copy()
    damaged[5] = np.nan
    damaged[7] = np.inf
    clean, broken = (
        np.asarray(jax.jit(lambda x: mlp(x[None], CONTEXT)[0])(x)) for x in (x, damaged)
    )
    others = np.delete(np.arange(12), [5, 7])
    np.testing.assert_array_equal(broken[others], clean[others])
    assert np.isnan(broken[[5, 7]]).all()


BIG = dataclasses.replace(CONFIG, embed_size=160, experts=Experts(count=32, per_token=3, size=136))


@pytest.mark.parametrize("tokens", often([1, 4, 8], [4]))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_call_reads_the_chosen_experts_alone(tokens, dtype, monkeypatch):
    """The compiled program's slices: of each matrix as many as tokens choose, or all there are."""
    monkeypatch.setattr(Model, "compiler_options", quick.OPTIMIZED)
    model = Model.abstract(BIG, dtype=dtype)
    cache = jax.eval_shape(lambda: model.new_cache(1, 64))
    words = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    program = model.jit(lambda m, t, c: m.score(t, c)).lower(model, words, cache).compile()
    text, experts = program.as_text(), BIG.experts
    if dtype == "bfloat16" and tokens == 1:
        tokens = 2  # XLA:CPU has no product of a single bfloat16 row
    chosen = min(experts.count, tokens * experts.per_token)
    inward = elements_read(text, (32, 160, 136))
    outward = elements_read(text, (32, 136, 160))
    layers, matrix = 2, 160 * 136
    assert inward == layers * 2 * chosen * matrix
    assert outward == layers * chosen * matrix


def test_reading_is_counted():
    """What the test above counts with: it sees an array that is read whole, and a loop's turns."""
    stack = jnp.zeros((6, 24, 40))

    def text(function, *args):
        return jax.jit(function).lower(stack, *args).compile().as_text()

    assert elements_read(text(lambda s: s.sum()), stack.shape) == stack.size
    one = text(lambda s, i: s[i] @ jnp.ones((40, 3)), jnp.int32(2))
    assert elements_read(one, stack.shape) == 24 * 40
    several = text(lambda s, i: jax.lax.map(lambda j: s[j].sum(0), i), jnp.zeros((5,), jnp.int32))
    assert elements_read(several, stack.shape) == 5 * 24 * 40


def layout(mesh, **rules):
    return Layout(
        "experts",
        mesh,
        "cpu",
        target=tuple((name, Rule(tuple(axes.split()))) for name, axes in rules.items()),
    )


LAYOUTS = {
    "experts over eight": layout(
        (("model", 8),), experts="model", heads="model", kv_heads="model", vocab="model"
    ),
    "experts and their width": layout(
        (("expert", 4), ("model", 2)),
        experts="expert",
        mlp="model",
        heads="expert model",
        kv_heads="expert model",
    ),
    "their width alone": layout((("model", 8),), mlp="model"),
    "experts beside rows": layout(
        (("data", 4), ("model", 2)), batch="data", experts="data", mlp="model"
    ),
    "rows apart": layout((("data", 2), ("model", 4)), batch="data", experts="model"),
    "the stream too": layout((("data", 2), ("model", 4)), embed="data", experts="model"),
}


def packed(model, quantization):
    return model.with_weights(ArrayWeights(model, Packing(quantization)).read(model.weights))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("quantization", often(["none", "int4"], ["int4"]))
def test_layouts_compute_the_same(name, quantization, expected):
    rounded = packed(MODEL, quantization)
    if quantization != "none":
        expected = np.asarray(score(rounded.unpacked(), TOKENS))
    placement = LAYOUTS[name].place("target", CONFIG.axis_sizes, jax.devices()[:8])
    placed = packed(MODEL.place(placement), quantization)
    close(score(placed, TOKENS), expected)
