"""The roofline, term by term, against figures worked out by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from spec_jax.models.config import Experts
from spec_jax.models.model import Model
from spec_jax.planning import cost
from spec_jax.planning.abstract import abstract_cache, abstract_model, bytes_per_chip, stand_ins
from spec_jax.planning.cost import Cache, Call, Exchange, Terms, Weights
from spec_jax.sharding import Chip, Layout, Rule
from tests.planning.shapes import TARGET, shape

CHIP = Chip("mine", memory=1e9, bandwidth=1e9, flops=1e9, link=1e6, topology="v5e:2x4")
VOCAB, EMBED, WIDTH, MLP = 2560, 256, 16 * 128, 512


def call(
    tokens: int,
    num_chips: int = 8,
    batch: int = 1,
    dtype=jnp.bfloat16,
    quantization: str = "none",
    **changes,
) -> Call:
    layout = Layout.tensor_parallel(num_chips)
    config = shape(**changes).config
    placement = layout.place("target", config.axis_sizes, stand_ins(layout))
    return called(abstract_model(config, dtype, quantization, placement), tokens, batch)


def called(model: Model, tokens: int, batch: int = 1, **options) -> Call:
    weights = Weights(model)
    return Call.of(weights, weights.cache(batch, 64, 64, model.dtype), tokens, **options)


def test_bytes_of_a_chip():
    found = call(1)
    layer = 4 * EMBED * WIDTH + 3 * EMBED * MLP
    table, norms = VOCAB * EMBED, 5 * EMBED
    assert found.weight_bytes == 2 * ((2 * layer + 2 * table) // 8 + norms)
    assert found.cache_bytes == 2 * (2 * 2 * 16 // 8 * 64 * 128) + 4
    # Of the embedding's table one row is read; the head is read whole.
    assert found.weight_bytes_read == found.weight_bytes - 2 * table // 8 + 2 * EMBED
    assert call(1, tied_head=True).weight_bytes_read == call(1, tied_head=True).weight_bytes


def test_quantized_weights_take_fewer_bytes_and_the_same_arithmetic():
    whole, int8, int4 = (call(5, quantization=each) for each in ("none", "int8", "int4"))
    norms = 2 * 5 * EMBED
    matrices = (whole.weight_bytes - norms) // 2
    # Scales: a float32 for an output; two float16 for 32 inputs of one.
    rows = [EMBED] * 5 + [WIDTH, MLP]
    outputs = [WIDTH, WIDTH, WIDTH, MLP, MLP, EMBED, EMBED]
    scales = 2 * sum(
        4 * out // (8 if rows_in == EMBED else 1)
        for rows_in, out in zip(rows, outputs, strict=True)
    )
    scales += 2 * 4 * VOCAB // 8
    assert int8.weight_bytes == matrices + norms + scales
    assert int4.weight_bytes == matrices // 2 + norms + 2 * 2 * matrices // 32
    assert whole.flops == int8.flops == int4.flops


def test_replicated_pieces_count_on_every_chip():
    # 16 heads over 32 chips are replicated, and so are their caches.
    assert call(1, num_chips=32).cache_bytes == call(1, num_chips=1).cache_bytes
    # 4 key/value heads over 8 chips lie on two chips each.
    assert call(1, num_kv_heads=4).cache_bytes == 2 * (2 * 2 * 1 * 64 * 128) + 4


@pytest.mark.parametrize(
    "changes", [{}, {"num_kv_heads": 4}, {"sliding_window": 100, "global_every": 2}]
)
def test_a_cache_is_as_large_as_the_one_that_is_made(changes):
    layout = Layout.tensor_parallel(8)
    config = shape(num_layers=3, **changes).config
    placement = layout.place("target", config.axis_sizes, stand_ins(layout))
    model = abstract_model(config, jnp.bfloat16, "none", placement)
    made = abstract_cache(model, 4, 2048, jnp.bfloat16, headroom=64)
    found = Weights(model).cache(4, 2048, 64, jnp.bfloat16)
    assert found.bytes == bytes_per_chip(made)
    assert found.slots == tuple(layer.slots for layer in made.layers)


def test_a_chunk_of_a_prompt_reads_what_it_sees_and_no_head():
    layout = Layout.tensor_parallel(8)
    for tied in (False, True):
        config = shape(tied_head=tied).config
        placement = layout.place("target", config.axis_sizes, stand_ins(layout))
        model = abstract_model(config, jnp.bfloat16, "none", placement)
        whole, chunk = called(model, 8), called(model, 8, seen=16)
        head = 2 * VOCAB * EMBED // 8
        table_rows = 2 * 8 * EMBED if tied else 0
        assert whole.weight_bytes_read - chunk.weight_bytes_read == head - table_rows
        assert chunk.cache_bytes_read == (whole.cache_bytes - 4) // 4  # 16 of 64 slots
        scores = 4 * 8 * 2 * 2 * 128 * (64 - 16)  # two layers of two heads
        assert whole.flops - chunk.flops == 2 * 8 * VOCAB * EMBED // 8 + scores
        assert chunk.cache_bytes == whole.cache_bytes


SPARSE = {"experts": Experts(count=16, per_token=2, size=128), "dense_layers": (1,)}


def test_only_the_chosen_experts_are_read():
    """By the experts' hidden width, of which every chip has an eighth."""
    stack, matrix = 16 * 3 * EMBED * 128 // 8, 3 * EMBED * 128 // 8
    one, three, all_of_them = (call(tokens, **SPARSE) for tokens in (1, 3, 20))
    dense = call(1, num_layers=1).weight_bytes
    attention = 2 * 4 * EMBED * WIDTH // 8
    norms, router = 2 * 2 * EMBED, 2 * EMBED * 16
    assert one.weight_bytes == dense + attention + norms + router + 2 * stack
    assert 16 * matrix == stack
    for found, tokens in ((one, 1), (three, 3), (all_of_them, 20)):
        looked_up = 2 * (VOCAB // 8 - tokens) * EMBED
        read = found.weight_bytes_read + looked_up
        # Each token leaves out fourteen of sixteen.
        assert found.weight_bytes - read == round(2 * stack * (14 / 16) ** tokens)
    # Every token is multiplied with two experts, whoever else wants them.
    assert three.flops == 3 * one.flops


def test_experts_that_are_cut_apart():
    mesh = (("data", 2), ("model", 4))

    def found(**rules: str) -> Call:
        target = tuple((name, Rule((axis,))) for name, axis in rules.items())
        layout = Layout("mine", mesh, "tpu", target=target)
        config = shape(**SPARSE).config
        placement = layout.place("target", config.axis_sizes, stand_ins(layout))
        model = abstract_model(config, jnp.bfloat16, "none", placement)
        return called(model, 1, batch=4)

    matrix = 2 * 3 * EMBED * 128
    table = 2 * (VOCAB - 2) * EMBED  # of two rows on each half of the chips
    apart = found(batch="data", experts="model")
    unread = round(4 * matrix * (14 / 16) ** 2)  # of four experts, by two rows
    assert apart.weight_bytes_read == apart.weight_bytes - table - unread
    assert apart.exchanges == (Exchange("experts", 1, 2 * EMBED * 4, 4),)
    # Beside the rows, all four of which are brought together: a quarter of eight experts.
    beside = found(batch="data", experts="data", mlp="model")
    unread = round(2 * matrix * (14 / 16) ** 4)
    assert beside.weight_bytes_read == beside.weight_bytes - table - unread
    assert beside.exchanges == (
        Exchange("MLP", 1, 2 * EMBED * 4, 4),
        Exchange("experts", 1, 2 * EMBED * 4, 8),
    )
    alone = found(experts="model")
    table = 2 * (VOCAB - 4) * EMBED
    unread = round(4 * matrix * (14 / 16) ** 4)
    assert alone.weight_bytes_read == alone.weight_bytes - table - unread
    whole = found()
    unread = round(16 * matrix * (14 / 16) ** 4)
    assert whole.weight_bytes_read == whole.weight_bytes - table - unread


def test_exchanges():
    assert call(5, batch=3).exchanges == (
        Exchange("embedding", 1, 15 * EMBED * 2, 8),
        Exchange("attention", 2, 15 * EMBED * 4, 8),
        Exchange("MLP", 2, 15 * EMBED * 4, 8),
    )
    assert cost.count_by_kind(call(5).exchanges) == {"all-reduce": 2 * TARGET.num_layers + 1}
    assert call(5, num_chips=1).exchanges == () and cost.exchanged_bytes(()) == 0
    # Heads that are replicated have nothing to sum.
    assert [each.what for each in call(1, num_chips=32).exchanges] == ["embedding", "MLP"]


def test_caches_cut_by_length():
    """4 key/value heads over 8 chips: two chips share a head, and each holds half of its slots."""
    layout = Layout.tensor_parallel(8)
    rules = (*layout.target, ("length", dict(layout.target)["kv_heads"]))
    layout = dataclasses.replace(layout, target=rules)
    config = shape(num_kv_heads=4).config
    placement = layout.place("target", config.axis_sizes, stand_ins(layout))
    model = abstract_model(config, jnp.bfloat16, "none", placement)
    cut, whole = called(model, 5, batch=3), call(5, batch=3, num_kv_heads=4)
    assert cut.cache_bytes == 3 * (2 * 2 * 2 * 32 * 128 + 4)
    assert whole.cache_bytes == 3 * (2 * 2 * 2 * 64 * 128 + 4)
    assert cut.flops == whole.flops and cut.weight_bytes == whole.weight_bytes
    heads = 15 * 4  # of all rows, the four query heads of a key/value head
    assert cut.exchanges == (
        whole.exchanges[0],
        Exchange("queries", 2, heads * 128 * 4 // 2, 2, "all-gather"),
        Exchange("best scores", 2, heads * 4, 2),
        Exchange("sums of values", 2, heads * 129 * 4, 2),
        *whole.exchanges[1:],
    )


def test_terms():
    found = call(1)
    terms = found.terms("tpu", CHIP)
    assert terms.weights == found.weight_bytes_read / 1e9
    assert terms.cache == found.cache_bytes / 1e9
    # 2 x 4 chips: one hop and three, there and back; five exchanges.
    assert terms.latency == pytest.approx(5 * 2 * 4 * 1e-6)
    # Two dimensions, and two directions of each, share what is sent.
    sent = 2 * 7 / 8 * (256 * 2 + 4 * 256 * 4)
    assert terms.transfer == pytest.approx(sent / (2 * 2) / 1e6)
    assert found.terms("gpu", CHIP).transfer == pytest.approx(sent / 1e6)
    memory = terms.weights + terms.cache
    assert terms.total == max(memory, terms.compute) + terms.latency + terms.transfer
    assert found.terms("gpu", CHIP).latency == pytest.approx(5 * 8e-6)
    # What is bound by arithmetic takes its time instead.
    many = call(500).terms("tpu", CHIP)
    assert many.compute > many.weights + many.cache
    assert many.total == many.compute + many.latency + many.transfer


def test_float32_takes_six_passes_on_a_tpu():
    narrow, wide = call(5), call(5, dtype=jnp.float32)
    assert wide.flops == narrow.flops
    compute = {each: wide.terms(each, CHIP).compute for each in ("tpu", "gpu")}
    assert compute["tpu"] == pytest.approx(6 * narrow.terms("tpu", CHIP).compute)
    assert compute["gpu"] == narrow.terms("gpu", CHIP).compute


def test_arithmetic_is_that_of_the_compiled_program():
    """Up to all that is not a product: norms, softmax, rotations."""
    layout = Layout.tensor_parallel(1)
    placement = layout.place("target", TARGET.axis_sizes, jax.devices()[:1])
    model = Model.abstract(TARGET, dtype=jnp.float32, placement=placement)
    cache = abstract_cache(model, 1, 32, jnp.float32)  # one block: loops are counted once
    words = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    program = jax.jit(lambda model, words, cache: model.score(words, cache))
    counted = program.lower(model, words, cache).compile().cost_analysis()
    found = Call.of(Weights(model), Cache(1, (32,) * TARGET.num_layers, 0), 8)
    assert found.flops == pytest.approx(counted["flops"], rel=0.03)


@pytest.mark.parametrize(
    "topology, num_chips, hops",
    [("v4:2x2x4", 16, 5), ("v5e:4x4", 16, 6), ("v5e:4x4", 4, 3), ("v5e:4x4", 2, 1)],
)
def test_hops(topology, num_chips, hops):
    chip = Chip("mine", 1.0, 1.0, 1.0, 1.0, topology)
    assert cost.exchange_latency("tpu", chip, num_chips) == pytest.approx(2e-6 * hops)


@pytest.mark.parametrize("acceptance, lookahead", [(0.0, 4), (0.6, 1), (0.8, 4), (1.0, 4)])
def test_tokens_per_round(acceptance, lookahead):
    # A round emits the tokens before the first refusal, and one more.
    expected = (
        sum((n + 1) * acceptance**n * (1 - acceptance) for n in range(lookahead))
        + (lookahead + 1) * acceptance**lookahead
    )
    assert cost.tokens_per_round(acceptance, lookahead) == pytest.approx(expected)


def test_the_best_lookahead():
    def seconds(k: int) -> float:
        return 1.0 + 0.1 * k

    found = cost.best_lookahead(0.8, 1.0, seconds)
    gains = {k: cost.speedup(0.8, k, 1.0, seconds) for k in range(1, 17)}
    assert gains[found] == max(gains.values()) and 1 < found < 16
    assert cost.speedup(0.8, 4, 1.0, seconds) == pytest.approx(3.3616 / 1.4)
    # A draft as slow as its target never pays, least of all in long rounds.
    assert cost.best_lookahead(0.8, 1.0, lambda k: 1.0 + k) == 1


def test_terms_add_up():
    one, two = Terms(1.0, 2.0, 3.0, 4.0, 5.0), Terms(10.0, 20.0, 30.0, 40.0, 50.0)
    assert one + two == Terms(11.0, 22.0, 33.0, 44.0, 55.0)


def test_a_draft_cut_elsewhere():
    """Replicated over one part of the mesh, sharded over another."""
    rules = (("heads", Rule(("inner",))), ("kv_heads", Rule(("inner",))))
    layout = Layout("mine", (("outer", 2), ("inner", 4)), "cpu", draft=rules)
    placement = layout.place("draft", TARGET.axis_sizes, stand_ins(layout))
    model = Model.abstract(TARGET, dtype=jnp.float32, placement=placement)
    found = called(model, 1)
    assert found.exchanges == (Exchange("attention", 2, EMBED * 4, 4),)
