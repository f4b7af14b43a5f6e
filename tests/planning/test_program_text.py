"""What rounds and prefill do on CPU, read from their compiled programs."""

from pathlib import Path

import jax.numpy as jnp
import pytest

from spec_jax.drafters.draft_model import DraftModel
from spec_jax.engine.batch_shape import BatchShape
from spec_jax.models.config import Experts
from spec_jax.models.model import Model
from spec_jax.planning.compiled import (
    abstract_state,
    compile_call,
    compile_prefill,
    compile_round,
    devices_for,
)
from spec_jax.planning.cost import Call, Weights, count_by_kind
from spec_jax.planning.hlo import by_kind
from spec_jax.sharding import Layout
from tests.often import often
from tests.planning.program_text import elements_read, held, moved_in_loops
from tests.planning.shapes import shape
from tests.planning.test_hlo import loop

ROOT = Path(__file__).parents[2]
LONG = 32768


def pair(layout: str, dtype: str, layers: int = 2) -> tuple[Model, DraftModel]:
    """A target of `layers` layers and a draft of one, of shapes alone."""
    read = Layout.read(ROOT / f"sharding/{layout}.toml")
    devices, models = devices_for(read), []
    for role, count in (("target", layers), ("draft", 1)):
        config = shape(num_layers=count, max_position=LONG).config
        placement = read.place(role, config.axis_sizes, devices)
        models.append(Model.abstract(config, dtype=jnp.dtype(dtype), placement=placement))
    return models[0], DraftModel(models[1], 4)


@pytest.mark.parametrize(
    "old, new, moved",
    [
        ("all-reduce(%x), channel_id=1, to_apply=%add", "copy(%x)", {(4, 8): 1}),
        ("{1,0:T(8,128)} all-reduce(%x), channel_id=1, to_apply=%add", "{1,0:S(1)} copy(%x)", {}),
        ("", "", {}),
    ],
    ids=["a copy", "to a nearer memory", "none"],
)
def test_copies_in_a_loop_are_found(old, new, moved):
    assert moved_in_loops(loop().replace(old, new)) == moved


@pytest.mark.parametrize(
    "layout, dtype",
    [
        pytest.param("cpu-1", "float32", marks=pytest.mark.slow),
        ("cpu-8", "float32"),
        pytest.param("cpu-1", "bfloat16", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("compile", often([compile_round, compile_prefill], [compile_prefill]))
def test_no_loop_copies_a_cache_or_a_weight(layout, dtype, compile):
    target, drafter = pair(layout, dtype)
    shapes = BatchShape(2, 2048, 128)
    state = abstract_state(target, drafter, shapes)
    lasting = held(target.params, drafter.model.params, state.cache, state.drafter)
    assert lasting
    program = compile(target, drafter, shapes)
    assert not lasting & set(moved_in_loops(program.text))


@pytest.mark.parametrize("tokens", often([1, 5], [5]))
@pytest.mark.parametrize("layout", often(["cpu-8", "cpu-8-experts"], ["cpu-8-experts"]))
def test_a_call_reads_the_chosen_experts_alone(layout, tokens):
    """Each chip reads no more of its experts than tokens choose; it plans with the mean of that."""
    layers, embed, per_token = 2, 256, 2
    experts = Experts(count=16, per_token=per_token, size=1024)
    config = shape(num_layers=layers, experts=experts).config
    read = Layout.read(ROOT / f"sharding/{layout}.toml")
    placement = read.place("target", config.axis_sizes, devices_for(read))
    model = Model.abstract(config, dtype=jnp.float32, placement=placement)
    program = compile_call(model, BatchShape(1, 256, 32), tokens, jnp.float32)
    here = 16 // placement.num_shards("experts")
    size = 1024 // placement.num_shards("mlp")
    found = elements_read(program.text, (here, embed, size))
    found += elements_read(program.text, (here, size, embed))
    assert found == layers * 3 * min(here, per_token * tokens) * embed * size
    whole = layers * 3 * here * embed * size
    weights = Weights(model)
    call = Call.of(weights, weights.cache(1, 256, 32, jnp.float32), tokens)
    table = 2560 // placement.num_shards("vocab") - tokens
    unread = call.weight_bytes - call.weight_bytes_read - 4 * table * embed
    assert unread == round(4 * whole * (1 - per_token / 16) ** tokens) >= 4 * (whole - found)
    assert by_kind(program.collectives) == {"all-reduce": 2 * layers + 1}
    assert count_by_kind(call.exchanges) == {"all-reduce": 2 * layers + 1}
    assert program.temporary_bytes < 0.1 * call.weight_bytes


@pytest.mark.slow
def test_a_layer_more_is_two_exchanges_more():
    counts = [
        by_kind(
            compile_round(*pair("cpu-8", "float32", layers), BatchShape(1, 256, 32)).collectives
        )
        for layers in (1, 2)
    ]
    assert counts[1] == {**counts[0], "all-reduce": counts[0]["all-reduce"] + 2}


@pytest.mark.parametrize("layout, num_shards", often([("cpu-1", 1), ("cpu-8", 8)], [("cpu-8", 8)]))
def test_a_long_prompt_takes_one_layers_keys_at_most(layout, num_shards):
    """The scores of a block of 512 tokens with all keys would take four times as much."""
    target, drafter = pair(layout, "float32")
    program = compile_prefill(target, drafter, BatchShape(1, LONG, 512))
    config = target.config
    keys = 4 * LONG * config.num_kv_heads // num_shards * config.head_dim
    assert program.temporary_bytes < 1.1 * keys
