"""Plans compiled for TPU slices, on a machine without a TPU."""

import dataclasses
import re
from collections import Counter
from pathlib import Path

import jax.numpy as jnp
import pytest

from spec_jax.checkpoints.shape import read_shape
from spec_jax.config import SamplingParams
from spec_jax.drafters.draft_model import DraftModel
from spec_jax.engine.batch_shape import BatchShape
from spec_jax.errors import ConfigError
from spec_jax.models.model import Model
from spec_jax.planning import make_plan
from spec_jax.planning.abstract import (
    abstract_cache,
    abstract_model,
    abstract_tokens,
    bytes_per_chip,
)
from spec_jax.planning.compiled import (
    abstract_state,
    compile_call,
    compile_prefill,
    compile_round,
    devices_for,
)
from spec_jax.planning.hlo import by_kind
from spec_jax.planning.pair import Pair
from spec_jax.sampling.parameters import SamplingFeatures
from spec_jax.sharding import Layout
from tests.often import often
from tests.planning.program_text import held, moved_in_loops
from tests.planning.shapes import VOCAB, keeps_its_caches, shape, shape_for

pytestmark = pytest.mark.tpu
ROOT = Path(__file__).parents[2]
SHARDING, CHECKPOINTS = ROOT / "sharding", ROOT / "checkpoints"
FILES = sorted(SHARDING.glob("tpu-*.toml"))
SELDOM = ("tpu-v5e-64", "tpu-v5p-64", "tpu-v6e-16", "tpu-v5e-2x16")
OFTEN = [file for file in FILES if file.stem not in SELDOM]
LONG = 32768


@pytest.mark.parametrize("file", often(FILES, OFTEN), ids=lambda file: file.stem)
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_target_call_reduces_twice_a_layer(file, tokens):
    layout = Layout.read(file)
    for layers in (2, 4):
        config = shape_for(layout, num_layers=layers).config
        placement = layout.place("target", config.axis_sizes, devices_for(layout))
        model = Model.abstract(config, dtype=jnp.bfloat16, placement=placement)
        shapes = BatchShape(layout.slices, 512, 32)
        program = compile_call(model, shapes, tokens, jnp.bfloat16)
        assert by_kind(program.collectives) == {"all-reduce": 2 * layers + 1}


def test_devices_add_in_bfloat16_where_the_layout_says_so():
    """Half the bytes of each layer's sums; the embedding's table is in bfloat16 anyway."""
    layout = Layout.read(SHARDING / "tpu-v4-16.toml")
    config, sent = shape_for(layout, num_layers=2).config, {}
    for dtype in ("float32", "bfloat16"):
        layout = dataclasses.replace(layout, all_reduce_dtype=dtype)
        placement = layout.place("target", config.axis_sizes, devices_for(layout))
        model = Model.abstract(config, dtype=jnp.bfloat16, placement=placement)
        program = compile_call(model, BatchShape(1, 512, 32), 5, jnp.bfloat16)
        sent[dtype] = Counter()
        for each, count in program.collectives.items():
            sent[dtype][each.shape.partition("[")[0]] += count
    assert sent == {"float32": {"f32": 4, "bf16": 1}, "bfloat16": {"bf16": 5}}


@pytest.mark.parametrize("tokens", [1, 5])
def test_rows_are_written_at_once(tokens):
    """Not one after the other, which took a loop of as many turns as rows in each layer."""
    layout = Layout.read(SHARDING / "tpu-v6e-8.toml")
    config = shape(num_layers=2).config
    placement = layout.place("target", config.axis_sizes, devices_for(layout))
    model = Model.abstract(config, dtype=jnp.bfloat16, placement=placement)
    cache = abstract_cache(model, 64, 512, jnp.bfloat16)
    call = model.jit(lambda model, tokens, cache: model.score(tokens, cache), donate_argnums=2)
    text = call.lower(model, abstract_tokens(model, 64, tokens), cache).compile().as_text()
    assert not re.findall(r" while\(", text)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_float32_weights_have_full_precision(tokens, dtype):
    layout = Layout.read(SHARDING / "tpu-v6e-8.toml")
    config = shape().config
    placement = layout.place("target", config.axis_sizes, devices_for(layout))
    model = Model.abstract(config, dtype=jnp.dtype(dtype), placement=placement)
    cache = abstract_cache(model, 1, 512, dtype)
    call = model.jit(lambda model, tokens, cache: model.score(tokens, cache), donate_argnums=2)
    text = call.lower(model, abstract_tokens(model, 1, tokens), cache).compile().as_text()
    assert ("bf16[" in text) == (dtype == "bfloat16")
    products = [line for line in text.splitlines() if re.search(r" (convolution|dot)\(", line)]
    # The products of a single token are multiplications and sums.
    assert bool(products) == (tokens > 1)
    full = ["operand_precision={highest,highest}" in line for line in products]
    assert all(full) if dtype == "float32" else not any(full)


@pytest.mark.parametrize("file", often(FILES, OFTEN), ids=lambda file: file.stem)
def test_a_slice_runs_what_was_computed(file):
    layout, draft = Layout.read(file), shape(num_layers=1)
    found = make_plan(shape_for(layout, num_layers=2), draft, layout, compile=True)
    program = found.round.program
    assert program is not None and program.memory_bytes is not None and found.fits
    for section in (found.target_call, found.scoring, found.draft_step, found.round):
        assert keeps_its_caches(section)
    for collective in program.collectives:
        is_sum = collective.kind == "all-reduce"
        assert is_sum or str(VOCAB) not in re.findall(r"\d+", collective.shape), collective
    computed = found.round.weight_bytes + found.round.cache_bytes
    assert program.argument_bytes == pytest.approx(computed, rel=0.05)
    least, most = (
        by_kind(counts)["all-reduce"] for counts in (program.least_collectives, program.collectives)
    )
    assert least == most == pytest.approx(found.round.collectives["all-reduce"], rel=0.1)


@pytest.mark.parametrize("options", [{}, {"top_k": 50, "top_p": 0.9}], ids=str)
def test_sampling_exchanges_as_often_as_computed(options):
    sampling = SamplingParams(temperature=1.0, **options)
    layout = Layout.read(SHARDING / "tpu-v4-16.toml")
    pair = Pair.of(shape(), shape(num_layers=1), layout, "bfloat16", devices=devices_for(layout))
    job = pair.job(1, 512, 2, SamplingFeatures.of([sampling]))
    target, draft = pair.target, pair.draft
    program = compile_round(target, DraftModel(draft, 2), job.shapes, sampling)
    assert by_kind(program.collectives) == pytest.approx(job.round.collectives, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 8])
def test_temporaries_are_about_as_estimated(batch):
    """Of four layers, a part of the whole that is much smaller in a real model."""
    layout, shapes = Layout.read(SHARDING / "tpu-v4-16.toml"), []
    for name, layers in (("70b", 4), ("draft-4b", 2)):
        found = read_shape(CHECKPOINTS / f"chinchilla-{name}.toml")
        config = found.config.resized(layers)
        shapes.append(dataclasses.replace(found, config=config))
    pair = Pair.of(*shapes[:2], layout, "bfloat16", devices=devices_for(layout))
    job = pair.job(batch, 2048, 4, SamplingFeatures())
    drafter = DraftModel(pair.draft, 4)
    for compile, estimate in ((compile_prefill, job.prefill), (compile_round, job.round)):
        program = compile(pair.target, drafter, job.shapes)
        assert program.memory_bytes == pytest.approx(estimate.memory_bytes, rel=0.15)


def test_too_large_a_model_is_refused_by_the_compiler():
    layout = Layout.read(SHARDING / "tpu-v6e-8.toml")
    huge = shape(num_layers=1, embed_size=2**15, mlp_size=2**21)
    found = make_plan(huge, shape(num_layers=1), layout, compile=True)
    assert found.fits is False and found.round.memory_bytes is None
    assert found.round.program and "RESOURCE_EXHAUSTED" in found.round.program.refusal


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_slices_exchange_one_flag_a_round(temperature):
    """Whether any row goes on. Weights lie within a slice, and so does every other collective."""
    layout = Layout.read(SHARDING / "tpu-v5e-2x16.toml")
    shapes = shape_for(layout, num_layers=1), shape_for(layout, num_layers=1)
    pair = Pair.of(*shapes, layout, "bfloat16", devices=devices_for(layout))
    mesh = pair.target.placement.mesh.devices
    assert [{each.slice_index for each in row} for row in mesh] == [{0}, {1}]
    job = pair.job(4, 512, 2, SamplingFeatures())
    drafter = DraftModel(pair.draft, 2)
    sampling = SamplingParams(temperature=temperature)
    program = compile_round(pair.target, drafter, job.shapes, sampling)
    across = [each for each in program.collectives.elements() if each.kind == "slice-transfer"]
    (flag,) = across
    # A number, in the smallest piece of memory that a TPU moves.
    assert flag.shape == "s32[1,1,128]"


def test_an_unknown_topology():
    layout = Layout.read(SHARDING / "tpu-v6e-8.toml")
    assert layout.chip is not None
    odd = dataclasses.replace(layout, chip=dataclasses.replace(layout.chip, topology="v6e:3x5x7"))
    with pytest.raises(ConfigError, match="libtpu does not describe the topology 'v6e:3x5x7'"):
        make_plan(shape(), shape(), odd, compile=True)


@pytest.fixture(scope="module")
def of_chinchillas_size() -> tuple[Model, DraftModel]:
    """Few layers of Chinchilla's size on v4-16: a copy of any weight or cache would show."""
    layout = Layout.read(SHARDING / "tpu-v4-16.toml")
    devices, models = devices_for(layout), []
    for role, name, layers in (("target", "70b", 4), ("draft", "draft-4b", 2)):
        config = read_shape(CHECKPOINTS / f"chinchilla-{name}.toml").config
        config = dataclasses.replace(config.resized(layers), max_position=LONG)
        placement = layout.place(role, config.axis_sizes, devices)
        models.append(Model.abstract(config, dtype=jnp.bfloat16, placement=placement))
    return models[0], DraftModel(models[1], 4)


def test_weights_and_caches_are_not_copied(of_chinchillas_size):
    """Neither before the loop, where it would take memory, nor in it."""
    target, drafter = of_chinchillas_size
    shapes = BatchShape(1, 2560, 512)
    program = compile_round(target, drafter, shapes)
    assert program.memory_bytes == pytest.approx(program.argument_bytes, rel=0.1)
    state = abstract_state(target, drafter, shapes)
    lasting = held(target.params, drafter.model.params, state.cache, state.drafter)
    assert not lasting & set(moved_in_loops(program.text))


@pytest.mark.parametrize("tokens", [1, 5])
def test_quantized_weights_are_not_written_out(tokens):
    """They are widened where they are multiplied: a chip's part of one would take 64 MiB."""
    layout = Layout.read(SHARDING / "tpu-v6e-8.toml")
    config = read_shape(CHECKPOINTS / "chinchilla-70b.toml").config
    config = config.resized(2)
    placement = layout.place("target", config.axis_sizes, devices_for(layout))
    bytes_held, temporaries = {}, {}
    for quantization in ("none", "int8", "int4"):
        model = abstract_model(config, "bfloat16", quantization, placement)
        program = compile_call(model, BatchShape(1, 2560, 512), tokens, jnp.bfloat16)
        bytes_held[quantization] = bytes_per_chip(model.params)
        temporaries[quantization] = program.temporary_bytes
    for quantization, bits in (("int8", 8), ("int4", 5)):
        assert bytes_held[quantization] == pytest.approx(bytes_held["none"] * bits / 16, rel=0.01)
        assert temporaries[quantization] < temporaries["none"] + 8 * 2**20


def test_a_long_prompt_takes_few_temporaries(of_chinchillas_size):
    """32k tokens; the float32 scores of a block of 512 tokens alone would take 256 MiB a chip."""
    target, drafter = of_chinchillas_size
    program = compile_prefill(target, drafter, BatchShape(1, LONG, 512))
    assert program.temporary_bytes < 144 * 2**20
