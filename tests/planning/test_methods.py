"""Plans of methods without a draft model, and of the blocks of GGUF files."""

from pathlib import Path

import jax
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from spec_jax.checkpoints import load
from spec_jax.checkpoints.gguf_blocks import form_of, unpack
from spec_jax.checkpoints.packing import Packing
from spec_jax.checkpoints.shape import read_shape
from spec_jax.kernels import QuantizedWeight
from spec_jax.planning import make_plan
from spec_jax.planning.pair import Pair
from spec_jax.sharding import Layout
from tests.checkpoints import tiny
from tests.often import often
from tests.planning.shapes import shape_for

ROOT = Path(__file__).parents[2]
WIDE = tiny.CONFIG | {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512}


def layout_of(name):
    return Layout.read(ROOT / f"sharding/{name}.toml")


def planned(layout="tpu-v5e-8", **options):
    layout = layout_of(layout)
    return make_plan(shape_for(layout, num_layers=8), None, layout, **options)


def test_a_lookup_costs_its_scoring_alone():
    found = planned(method="prompt_lookup", num_speculative_tokens=3)
    assert found.draft is None and found.draft_step is None
    assert found.round.seconds == pytest.approx(found.scoring.seconds + found.sampling.seconds)
    assert found.round.weight_bytes == found.target_call.weight_bytes
    assert found.round.cache_bytes == found.target_call.cache_bytes
    expected = found.tokens_per_round * found.target_call.seconds / found.round.seconds
    assert found.speedup == pytest.approx(expected)
    record = found.as_dict()
    assert record["draft"] is record["draft_step"] is None and record["method"] == "prompt_lookup"


def test_plain_decoding_is_a_call_and_a_token():
    found = planned(method="none")
    assert found.num_speculative_tokens == 0 and found.tokens_per_round == 1
    assert found.scoring.seconds == found.target_call.seconds
    assert (found.speedup, found.best) == (None, None)


@pytest.mark.parametrize("layers", [2, 5])
def test_early_layers_are_read_once_a_draft_token_and_the_others_once(layers):
    k, options = 3, {"method": "early_exit", "early_exit_layers": layers}
    found = planned(num_speculative_tokens=k, **options)
    target, step, scoring = found.target_call, found.draft_step, found.scoring
    # Both parts read the head, which lies there once.
    head = step.weight_bytes + scoring.weight_bytes - target.weight_bytes
    block = (target.weight_bytes - head) / 8
    assert step.weight_bytes == pytest.approx(head + layers * block)
    # The last draft token is read for its hidden states alone, without the head.
    last = layers * block / found.layout.chip.bandwidth
    expected = k * step.terms.weights + last + scoring.terms.weights
    assert found.round.terms.weights == pytest.approx(expected, rel=1e-3)
    assert step.cache_bytes == pytest.approx(target.cache_bytes * layers / 8, rel=1e-3)
    assert found.round.weight_bytes == target.weight_bytes
    assert found.round.cache_bytes == target.cache_bytes
    # A block has two sums; the embedding is summed where tokens come in.
    assert step.collectives["all-reduce"] == 2 * layers + 1
    assert scoring.collectives["all-reduce"] == 2 * (8 - layers)


def test_layers_that_draft_are_not_offloaded():
    found = planned("gpu-8", method="early_exit", early_exit_layers=3, offload="host")
    assert found.draft_step.host_bytes == 0
    plain = planned("gpu-8", method="none", offload="host")
    assert found.round.host_bytes == plain.round.host_bytes * 5 / 8
    # Prompts and plain decoding stream all layers; those that draft lie on the devices as well.
    assert found.target_call.host_bytes == plain.target_call.host_bytes
    block = plain.round.host_bytes / 8
    assert found.round.weight_bytes == plain.round.weight_bytes + 3 * block
    assert found.prefill.held_bytes - found.round.cache_bytes == found.round.weight_bytes


@pytest.mark.parametrize(
    "method", often(["early_exit", "prompt_lookup", "none"], ["prompt_lookup"])
)
def test_what_is_compiled_without_a_draft_model_is_what_is_planned(method):
    found = planned("cpu-2", method=method, num_speculative_tokens=2, batch=2, compile=True)
    held = found.round.weight_bytes + found.round.cache_bytes
    assert found.round.program.argument_bytes == pytest.approx(held, rel=0.02)
    assert found.prefill.program.memory_bytes >= found.round.weight_bytes
    computed, compiled = found.round.collectives, found.round.as_dict()["collectives"]
    widths = 2 if method == "prompt_lookup" else 1  # a round without a draft scores one token
    assert compiled["all-reduce"] == pytest.approx(widths * computed["all-reduce"], abs=2)


def forms(weight):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), weight)


@pytest.mark.parametrize("kind", [each for each in GGMLQuantizationType if form_of(each)])
def test_the_form_of_blocks_is_that_of_their_numbers(kind):
    inputs, size = GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 60, (6, 512 // inputs * size), np.uint8)
    matrix = jax.ShapeDtypeStruct((512, 6), "bfloat16")
    assert forms(QuantizedWeight.abstract(matrix, form_of(kind))) == forms(
        QuantizedWeight.of(unpack(blocks, kind), "bfloat16")
    )


@pytest.mark.parametrize("name", ["Q4_1", "Q5_0", "Q8_0"])
def test_a_file_is_planned_as_it_is_loaded(tmp_path, name):
    path = tmp_path / "tiny.gguf"
    kind, layout = GGMLQuantizationType[name], layout_of("cpu-2")
    tiny.write_gguf(path, WIDE, tiny.llama_tensors(WIDE), quantization=kind)
    found = read_shape(path)
    pair = Pair.of(found, None, layout, "bfloat16", "gguf", method="none")

    def place(config):
        return layout.place("target", config.axis_sizes, jax.devices()[:2])

    loaded = load(path, dtype="bfloat16", packing=Packing("gguf"), place=place).model
    assert found.forms and forms(pair.target.params) == forms(loaded.params)
    given = make_plan(found, None, layout, method="none", quantization="gguf")
    full = make_plan(found, None, layout, method="none")
    assert given.round.weight_bytes < full.round.weight_bytes
