"""Caches that are cut by length over the devices that share a key/value head."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.config import SamplingParams
from spec_jax.decoding.draft_length import Constant
from spec_jax.drafters.draft_model import DraftModel
from spec_jax.drafters.none import NoDraft
from spec_jax.drafters.prompt_lookup import PromptLookup
from spec_jax.engine.engine import Engine
from spec_jax.engine.programs import DECODE
from spec_jax.errors import ConfigError
from spec_jax.models.attention_mask import AttentionMask
from spec_jax.models.model import Model
from spec_jax.sharding import Layout, Rule
from tests.harness import drive, request
from tests.often import often
from tests.sharding.test_meshes import VOCAB, collectives, config

AXES = ("outer", "inner")
RULES = tuple((name, Rule(AXES)) for name in ("length", "heads", "kv_heads", "mlp", "vocab"))
LAYOUT = Layout(
    "cut",
    (("data", 2), ("outer", 2), ("inner", 2)),
    "cpu",
    target=(("batch", Rule(("data",))), *RULES),
    draft=(("batch", Rule(("data",))), *RULES),
)
KINDS = {
    "plain": {},
    "window": {"sliding_window": 24, "global_every": 2},
    "slopes": {"alibi_scale": 1.0, "rope_fraction": 0.0},
    "caps": {"score_cap": 5.0},
}


def placed(model: Model, role: str = "target") -> Model:
    return model.place(LAYOUT.place(role, model.config.axis_sizes, jax.devices()[:8]))


@functools.cache
def model(kind: str, seed: int = 0) -> Model:
    shape = config(2 - seed, 2, **KINDS[kind])
    return Model.random(shape, seed=seed)


@pytest.mark.parametrize(("kv_heads", "length"), [(4, 1), (2, 2), (1, 4)])
def test_each_device_holds_its_slots_of_its_heads(kv_heads, length):
    cut = placed(Model.random(config(1, kv_heads)))
    assert cut.placement.num_shards("length") == length
    (layer,) = jax.jit(lambda model: model.new_cache(4, 64))(cut).layers
    (shape,) = {shard.data.shape for shard in layer.keys.addressable_shards}
    assert shape == (2, kv_heads * length // 4, 64 // length, 8)
    assert len({str(shard.index) for shard in layer.keys.addressable_shards}) == 8


TREE = np.tri(5, dtype=bool) & ~np.eye(5, k=-3, dtype=bool)


@functools.partial(jax.jit, static_argnums=1)
def logits(model: Model, backend: str):
    """Of a padded prompt, of a part of it that follows, of tokens after it, and of a tree.

    Texts become longer than the ring of a layer with a window, which has 64 slots.
    """
    model = dataclasses.replace(model, attention=backend)
    rng = np.random.default_rng(0)
    *prompt, drafted = (jnp.asarray(rng.integers(0, VOCAB, (4, n)), jnp.int32) for n in (40, 40, 5))
    lengths, found = jnp.asarray([40, 1, 17, 33], jnp.int32), []
    cache = model.new_cache(4, 160, headroom=40)
    for part in prompt:
        out, _, cache = model.score(part, cache, num_tokens=lengths)
        cache = cache.with_lengths(cache.lengths + lengths)
        found.append(jnp.where((jnp.arange(40)[None] < lengths[:, None])[..., None], out, 0.0))
    out, _, cache = model.score(drafted, cache)
    found.append(out)
    cache = cache.with_lengths(cache.lengths + 2)
    out, _, cache = model.score(
        drafted, cache, AttentionMask.branching(cache, np.array([0, 1, 2, 2, 3]), TREE)
    )
    found.append(out)
    sources = cache.lengths[:, None] + jnp.asarray([[0, 2, 4]])
    cache = cache.gather(sources, cache.lengths).with_lengths(cache.lengths + 3)
    out, _, _ = model.score(drafted, cache)
    return *found, out


SCORED = [
    (kind, backend, cache)
    for kind in KINDS
    for backend in ("dense", "blocked")
    for cache in ("wide", "int8")
]
OFTEN_SCORED = [
    ("plain", "dense", "wide"),
    ("slopes", "dense", "wide"),
    ("window", "blocked", "wide"),
]


@pytest.mark.parametrize(("kind", "backend", "cache"), often(SCORED, OFTEN_SCORED))
def test_logits_are_those_of_one_device(kind, backend, cache):
    alone = dataclasses.replace(model(kind), rounds_cache=cache == "int8")
    for expected, found in zip(logits(alone, backend), logits(placed(alone), backend), strict=True):
        expected = np.asarray(expected)
        near = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=near)


def drafter(method: str, draft: Model):
    return {
        "none": lambda: NoDraft(0),
        "draft_model": lambda: DraftModel(draft, 3),
        "tree": lambda: DraftModel(draft, 3, num_drafts=2),
        "prompt_lookup": lambda: PromptLookup(3, 3),
    }[method]()


def decoded(method: str, kind: str, *place: str):
    """Tokens of six requests in four slots, and the engine."""
    target, draft = model(kind), model(kind, 1)
    if place:
        target, draft = placed(target), placed(draft, "draft")
    propose = drafter(method, draft)
    engine = Engine(target, propose, Constant(propose.lookahead), max_model_len=160)
    random = np.random.default_rng(0)
    requests = [
        request(
            random.integers(0, VOCAB, 3 + 9 * i).tolist(),
            SamplingParams(max_tokens=9 + 4 * i, temperature=0.8 * (i % 2), top_p=0.9),
            seed=i,
        )
        for i in range(6)
    ]
    choose = lambda low, high: int(random.integers(low, high + 1))  # noqa: E731
    return drive(engine, requests, 4, choose), engine


CASES = [
    (method, kind) for method in ("none", "draft_model", "tree", "prompt_lookup") for kind in KINDS
]
SOME = [("tree", "window")]


@pytest.mark.parametrize(("method", "kind"), often(CASES, SOME))
def test_requests_say_the_same_on_one_device(method, kind):
    assert decoded(method, kind, "cut")[0] == decoded(method, kind)[0]


def test_no_part_of_a_cache_travels_in_a_round():
    _, engine = decoded("draft_model", "plain", "cut")
    kv_bytes = 160 * 8  # the slots of one head of one row
    for program in engine.compiler.programs(DECODE):
        for shape, kind in collectives(program.as_text()):
            sizes = [int(each) for each in re.findall(r"\d+", shape.split("{")[0])[1:]]
            assert np.prod(sizes, initial=1) < kv_bytes, (kind, shape)


def test_another_axis_may_still_cut_caches():
    rules = (("batch", Rule(("data",))), ("length", Rule(("inner",))), ("vocab", Rule(("outer",))))
    layout = Layout("apart", LAYOUT.mesh, "cpu", target=rules)
    alone = model("plain")
    cut = alone.place(layout.place("target", alone.config.axis_sizes, jax.devices()[:8]))
    assert cut.placement.mesh_axes("length") == ("inner",)
    for expected, found in zip(logits(alone, "blocked"), logits(cut, "blocked"), strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=0, atol=1e-4)


def test_axes_that_the_same_array_uses_are_refused():
    rules = (("length", Rule(("inner",))), ("kv_heads", Rule(AXES)), ("heads", Rule(AXES)))
    with pytest.raises(ConfigError, match="uses already in the same array"):
        Layout("wrong", LAYOUT.mesh, "cpu", target=rules)
