"""The loop on emulated meshes decodes the same tokens as on one device."""

import dataclasses
import functools
import itertools
import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spec_jax.config import SamplingParams
from spec_jax.decoding.draft_length import Constant
from spec_jax.drafters.draft_model import DraftModel
from spec_jax.drafters.none import NoDraft
from spec_jax.drafters.prompt_lookup import PromptLookup
from spec_jax.drafters.recycle import TokenRecycling
from spec_jax.engine.engine import Engine
from spec_jax.engine.programs import DECODE, INSERT
from spec_jax.kernels import QuantizedWeight, products, quantize
from spec_jax.models.config import TransformerConfig
from spec_jax.models.layers import Linear
from spec_jax.models.model import Model
from spec_jax.sharding import Layout, Rule
from tests.harness import completions, drive, finish, request
from tests.often import often

LAYOUTS = [*map(Layout.read, sorted((Path(__file__).parents[2] / "sharding").glob("*.toml")))]
EMULATED = [layout for layout in LAYOUTS if layout.size <= len(jax.devices())]
VOCAB = 64


def config(layers: int, kv_heads: int, heads: int = 8, **others) -> TransformerConfig:
    return TransformerConfig.of(
        vocab_size=VOCAB,
        embed_size=64,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=8,
        mlp_size=128,
        max_position=512,
        **others,
    )


TARGET, DRAFT = Model.random(config(2, 4), seed=0), Model.random(config(1, 2), seed=1)


def sharded(*axes: str) -> tuple:
    names = ("heads", "kv_heads", "mlp", "vocab")
    return (("batch", Rule(("data",))), *((name, Rule(axes)) for name in names if axes))


MESHES = {
    "1": ((("data", 1), ("model", 1)), sharded("model"), sharded("model")),
    "tensor-2": ((("data", 1), ("model", 2)), sharded("model"), sharded("model")),
    "data-4": ((("data", 4), ("model", 1)), sharded("model"), sharded("model")),
    "mixed-4": ((("data", 2), ("model", 2)), sharded("model"), sharded()),
    "tensor-8": ((("data", 1), ("model", 8)), sharded("model"), sharded("model")),
    "mixed-8, draft within": (
        (("data", 2), ("outer", 2), ("inner", 2)),
        sharded("outer", "inner"),
        sharded("inner"),
    ),
}


def placed(mesh: str, target: Model = TARGET, draft: Model = DRAFT) -> tuple[Model, Model]:
    layout = Layout(mesh, MESHES[mesh][0], "cpu", target=MESHES[mesh][1], draft=MESHES[mesh][2])
    devices = jax.devices()[: layout.size]
    return (
        target.place(layout.place("target", target.config.axis_sizes, devices)),
        draft.place(layout.place("draft", draft.config.axis_sizes, devices)),
    )


def score(model: Model, tokens):
    return jax.jit(lambda model, tokens: model.score(tokens, model.new_cache(4, 32))[0])(
        model, tokens
    )


@pytest.mark.parametrize("mesh", often(MESHES, [*MESHES][1::2]))
def test_logits_are_those_of_one_device(mesh):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (4, 5)), jnp.int32)
    for plain, spread in zip((TARGET, DRAFT), placed(mesh), strict=True):
        expected = np.asarray(score(plain, tokens))
        actual = np.asarray(score(spread, tokens))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda dtype: dtype.__name__)
def test_devices_round_what_they_add_where_the_layout_says_so(dtype):
    """What halves of a product add up to is rounded to bfloat16; float64 beside it."""
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=size), dtype) for size in ((4, 128), (128, 64)))
    layer = Linear(128, 64, axes=("mlp", "embed"), bias=False, dtype=dtype, rngs=nnx.Rngs(0))
    graphdef, _ = nnx.split(layer)
    layout = Layout("halves", (("model", 2),), "cpu", target=(("mlp", Rule(("model",))),))
    found = {}
    for sums in ("float32", "bfloat16"):
        own = dataclasses.replace(layout, all_reduce_dtype=sums)
        placement = own.place("target", {"mlp": 128}, jax.devices()[:2])
        layer.weight.set_value(placement.put(np.asarray(weight), "mlp", "embed"))

        @jax.jit
        def apply(state, x, placement=placement):
            return placement.pin(nnx.merge(graphdef, state)(x, placement), None, None)

        cut = placement.put(np.asarray(x, np.float32), None, "mlp")
        found[sums] = np.asarray(apply(nnx.state(layer), cut), np.float64)
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    halves = [x[:, half] @ weight[half] for half in (slice(64), slice(64, None))]
    np.testing.assert_allclose(found["float32"], sum(halves), rtol=0, atol=2e-5)
    if dtype == jnp.float32:
        np.testing.assert_array_equal(found["bfloat16"], found["float32"])
        return

    def rounded(values):
        return values.astype(jnp.bfloat16).astype(np.float64)

    # Chips round each half. XLA:CPU keeps halves in float32 and rounds what they add up to.
    ways = rounded(sum(halves)), rounded(sum(rounded(each) for each in halves))
    assert np.mean([found["bfloat16"] == each for each in ways], axis=1).max() > 0.98
    np.testing.assert_allclose(found["bfloat16"], sum(halves), rtol=2**-7, atol=2**-4)
    assert np.mean(found["bfloat16"] == found["float32"]) < 0.1


@pytest.mark.parametrize("bits", [8, 4])
def test_devices_round_what_they_add_of_quantized_products(bits):
    """Of all parts of a product together, so that they are one exchange."""
    rng = np.random.default_rng(0)
    rows = quantize(rng.normal(size=(64, 256)).astype(np.float32), bits)
    layout = Layout("halves", (("model", 2),), "cpu", target=(("mlp", Rule(("model",))),))
    placement = layout.place("target", {"mlp": 256}, jax.devices()[:2])
    weight = QuantizedWeight.of(rows, jnp.bfloat16, placement.sharding("mlp", "embed"))
    x = placement.put(rng.normal(size=(4, 256)).astype(np.float32), None, "mlp")
    found = {}
    for sums in ("float32", "bfloat16"):
        call = jax.jit(
            lambda x, weight, sums=sums: placement.pin(products(x, [weight], sums)[0], None, None)
        ).lower(x, weight)
        program = call.compile()
        assert len(re.findall(r" all-reduce(?:-start)?\(", program.as_text())) == 1
        found[sums] = np.asarray(program(x, weight))
    scale = np.abs(found["float32"]).max()
    np.testing.assert_allclose(found["bfloat16"], found["float32"], rtol=0, atol=scale * 2**-6)
    assert np.mean(found["bfloat16"] == found["float32"]) < 0.1


def drafter(method: str, draft: Model):
    return {
        "none": lambda: NoDraft(0),
        "draft_model": lambda: DraftModel(draft, 3),
        "prompt_lookup": lambda: PromptLookup(3, 3),
        "recycle": lambda: TokenRecycling(3),
    }[method]()


def decode(method, verification, target, draft, batches, temperatures=(0.0, 0.8)):
    """Tokens of the first prompts at each temperature, in batches of these sizes."""
    propose = drafter(method, draft)
    engine = Engine(target, propose, Constant(propose.lookahead), verification, max_model_len=256)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (8, 3, 21, 13)]
    found = []
    for temperature in temperatures:
        params = SamplingParams(max_tokens=16, ignore_eos=True, temperature=temperature, top_p=0.9)
        requests = [request(prompt, params, seed=i) for i, prompt in enumerate(prompts)]
        for group in (requests[:size] for size in batches):
            found.append(completions(finish(engine.start(group)), group))
    return found


METHODS = [
    (method, verification)
    for method in ("draft_model", "prompt_lookup", "recycle", "none")
    for verification in ("token", "coupled")
]
ALONE = functools.cache(functools.partial(decode, target=TARGET, draft=DRAFT))


ONCE = [*zip(itertools.cycle(MESHES), METHODS, strict=False)]


@pytest.mark.parametrize(("mesh", "how"), often(ONCE, ONCE[3:4]))
def test_tokens_are_those_of_one_device(mesh, how):
    """Every mesh and every way of decoding at least once."""
    target, draft = placed(mesh)
    assert decode(*how, target, draft, (4,)) == ALONE(*how, batches=(4,))


@pytest.mark.slow
@pytest.mark.parametrize("how", METHODS)
@pytest.mark.parametrize("mesh", MESHES)
def test_tokens_are_those_of_one_device_in_the_whole_grid(mesh, how):
    target, draft = placed(mesh)
    assert decode(*how, target, draft, (1, 4)) == ALONE(*how, batches=(1, 4))


def test_speculation_is_lossless_where_devices_add_in_bfloat16():
    """Greedy tokens equal plain decoding's, whose sums are rounded as well."""
    layout = Layout("tensor-2", MESHES["tensor-2"][0], "cpu", *MESHES["tensor-2"][1:])
    layout = dataclasses.replace(layout, all_reduce_dtype="bfloat16")
    models = [
        Model.random(config(2, 4), seed=seed, dtype=jnp.bfloat16).place(
            layout.place(role, config(2, 4).axis_sizes, jax.devices()[:2])
        )
        for seed, role in enumerate(("target", "draft"))
    ]
    (plain,) = decode("none", "coupled", *models, (4,), (0.0,))
    (drafted,) = decode("draft_model", "coupled", *models, (4,), (0.0,))
    assert drafted == plain and {len(each) for each in plain} == {16}


def test_rows_join_and_leave_on_a_mesh_and_no_cache_travels():
    """Two slots on each of two shards of the batch: a row is read where its slot is."""

    def decoded(target, draft):
        engine = Engine(target, DraftModel(draft, 3), Constant(3), max_model_len=256)
        random = np.random.default_rng(0)
        requests = [
            request(
                random.integers(0, VOCAB, 3 + 5 * i).tolist(),
                SamplingParams(max_tokens=5 + 4 * i, temperature=0.8 * (i % 2)),
                seed=i,
            )
            for i in range(6)
        ]
        choose = lambda low, high: int(random.integers(low, high + 1))  # noqa: E731
        return drive(engine, requests, 4, choose), engine

    expected, _ = decoded(TARGET, DRAFT)
    found, engine = decoded(*placed("mixed-4"))
    assert found == expected
    (program,) = engine.compiler.programs(INSERT)
    for shape, kind in collectives(program.as_text()):  # of some counters, but of no cache
        assert len(re.findall(r"\d+", shape.split("{")[0])) <= 3, (kind, shape)


@functools.cache
def decode_on(mesh: tuple, rules: tuple):
    """Tokens of two rows on emulated devices; layouts that shard alike share them."""
    models = [Model.random(config(1, 16, heads=16), seed=seed) for seed in (0, 1)]
    if mesh:
        layout = Layout("file", mesh, "cpu", *rules)
        devices = jax.devices()[: layout.size]
        models = [
            model.place(layout.place(role, model.config.axis_sizes, devices))
            for role, model in zip(("target", "draft"), models, strict=True)
        ]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    requests = [request([1, 2, 3], params), request([5], params)]
    propose = DraftModel(models[1], 2)
    engine = Engine(models[0], propose, Constant(2), "token", max_model_len=256)
    return completions(finish(engine.start(requests)), requests)


@pytest.mark.slow
@pytest.mark.parametrize("layout", EMULATED, ids=lambda layout: layout.name)
def test_every_layout_decodes(layout):
    """Layouts of more devices are compiled for their slices (tests/planning/test_tpu.py)."""
    tokens = decode_on(layout.mesh, (layout.target, layout.draft))
    assert tokens == decode_on((), ()) and len(tokens[0]) == 8


COLLECTIVE = re.compile(
    r"= (\S+) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def collectives(program: str) -> list[tuple[str, str]]:
    """Shape and kind of each collective in a compiled program's text."""
    return COLLECTIVE.findall(program)


@pytest.mark.parametrize("kv_heads", [8, 2, 1])
@pytest.mark.parametrize("tokens", often([1, 5], [5]))
def test_a_target_call_reduces_twice_a_layer(kv_heads, tokens):
    """And once for the embedding; a tiny model's program is as a large one's."""
    for layers in (2, 4):
        model, _ = placed("tensor-8", target=Model.random(config(layers, kv_heads)))
        words = jnp.zeros((1, tokens), jnp.int32)
        program = jax.jit(lambda model, words, cache: model.score(words, cache))
        cache = jax.jit(lambda model: model.new_cache(1, 32))(model)
        text = program.lower(model, words, cache).compile().as_text()
        assert Counter(kind for _, kind in collectives(text)) == {"all-reduce": 2 * layers + 1}


def test_a_round_gathers_no_vocabulary_and_keeps_its_buffers():
    target, draft = placed("tensor-8")
    engine = Engine(target, DraftModel(draft, 3), Constant(3), "token", max_model_len=256)
    engine.start([request([1, 2, 3])]).advance(1)
    (program,) = engine.compiler.programs(DECODE)
    for shape, kind in collectives(program.as_text()):
        assert kind == "all-reduce" or str(VOCAB) not in re.findall(r"\d+", shape), (kind, shape)
    size = program.memory_analysis()
    caches = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.target.new_cache(1, 256)))
    assert size.alias_size_in_bytes >= caches / 8 and size.output_size_in_bytes
