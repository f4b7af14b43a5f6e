"""Plans for emulated devices: the computed figures agree with the compiler."""

import dataclasses
import re
from collections import Counter
from pathlib import Path

import pytest

from spec_jax.checkpoints.shape import read_shape
from spec_jax.config import SamplingParams
from spec_jax.errors import ConfigError
from spec_jax.models.sizes import parameter_count
from spec_jax.planning import CompiledProgram, derived_draft, make_plan
from spec_jax.planning.hlo import by_kind
from spec_jax.sharding import Chip, Layout
from tests.often import often
from tests.planning.shapes import VOCAB, keeps_its_caches, shape, shape_for

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "sharding").glob("*.toml"))


def plan(target, draft, layout="cpu-8", **options):
    return make_plan(target, draft, Layout.read(ROOT / f"sharding/{layout}.toml"), **options)


@pytest.mark.slow
@pytest.mark.parametrize("layers", often([2, 4], [2]))
def test_the_compiler_agrees(layers):
    found = plan(
        shape(num_layers=layers), shape(num_layers=1), dtype="float32", context=400, compile=True
    )
    for section in (found.target_call, found.scoring):
        assert section.as_dict()["collectives"] == {"all-reduce": 2 * layers + 1}
        assert keeps_its_caches(section)
        assert section.collectives == {"all-reduce": 2 * layers + 1}
    assert found.draft_step.as_dict()["collectives"] == {"all-reduce": 3}
    program = found.round.program
    assert program is not None and keeps_its_caches(found.round)
    for collective in program.collectives:
        is_sum = collective.kind == "all-reduce"
        assert is_sum or str(VOCAB) not in re.findall(r"\d+", collective.shape), collective
    least = by_kind(program.least_collectives)["all-reduce"]
    most = by_kind(program.collectives)["all-reduce"]
    # Drafting and scoring, and what sampling adds, which does not depend on the depth.
    models = 2 * layers + 1 + 4 * 3
    assert found.sampling.collectives == {"all-reduce": 2 * 5}
    assert found.round.collectives == {"all-reduce": models + 2 * 5}
    assert models < least < models + 60 and least <= most
    computed = found.round.weight_bytes + found.round.cache_bytes
    assert program.argument_bytes == pytest.approx(computed, rel=0.01)
    # Temporaries are a larger part of a model as small as this.
    assert program.temporary_bytes < 0.2 * computed
    prefill = found.prefill.program
    assert prefill and prefill.memory_bytes and program.memory_bytes
    # The caches are results of it, and nobody reads what the last layers give out. The compiler may
    # sum the embeddings of both models in one exchange.
    assert prefill.argument_bytes == pytest.approx(found.round.weight_bytes, rel=0.01)
    assert prefill.memory_bytes > computed
    exchanges = by_kind(prefill.collectives)
    assert exchanges.keys() == {"all-reduce"}
    assert exchanges["all-reduce"] - 2 * (layers - 1) in (1, 2)
    assert found.memory_bytes == max(prefill.memory_bytes, program.memory_bytes)
    compiled = found.as_dict()["prefill"]["compiled"]
    assert compiled["temporary_bytes"] == prefill.temporary_bytes
    assert found.compile_seconds and found.compile_seconds > 0
    assert found.fits is None and found.speedup is None and found.round.seconds is None


def test_json_without_compiling():
    found = plan(shape(), shape(num_layers=1), "tpu-v6e-8", batch=3, context=100).as_dict()
    assert found["projection"] is True
    assert {"target_call", "draft_step", "round", "compile_seconds", "fits"} <= set(found)
    assert found["compile_seconds"] is None and found["fits"] is True
    assert (found["batch"], found["capacity"]) == (4, 256)
    for name in ("target_call", "scoring", "draft_step", "round"):
        section = found[name]
        computed = section["computed"]
        parts = ("weight_bytes", "cache_bytes", "temporary_bytes")
        assert section["memory_bytes_per_chip"] == sum(computed[part] for part in parts)
        assert section["projected_seconds"] > 0 and section["compiled"] is None
    rounds, prefill = found["round"]["projected_seconds"], found["prefill"]
    assert prefill["compiled"] is None and (prefill["block"], prefill["chunks"]) == (128, 1)
    assert found["seconds_to_first_token"] == prefill["projected_seconds"] + rounds
    assert found["memory_bytes_per_chip"] == max(
        found[part]["memory_bytes_per_chip"] for part in ("round", "prefill")
    )
    draft, scoring = found["draft_step"]["projected_seconds"], found["scoring"]["projected_seconds"]
    assert rounds > scoring + 4 * draft
    plain = found["target_call"]["projected_seconds"]
    assert found["speedup"] == pytest.approx(found["tokens_per_round"] * plain / rounds)
    assert found["best_speedup"] >= found["speedup"]


def test_what_cannot_be_cut_is_shown():
    small = shape(num_heads=9, num_kv_heads=3, mlp_size=509)
    found = plan(small, shape(), dtype="float32")
    found_axes = {(each.role, each.axis, each.size, each.num_shards) for each in found.replicated}
    assert found_axes == {
        ("target", "heads", 9, 1),
        ("target", "kv_heads", 3, 1),
        ("target", "mlp", 509, 1),
    }
    assert plan(shape(), shape()).replicated == ()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_layout_has_a_plan(file):
    layout = Layout.read(file)
    found = make_plan(shape_for(layout), shape(num_layers=1), layout)
    chip = found.layout.chip
    assert (found.round.seconds is None) == (chip is None) == (found.fits is None)


def test_a_model_that_does_not_fit():
    layout = Layout("mine", (("model", 1),), "gpu", chip=Chip("small", 1e6, 1e9, 1e9, 1e9))
    assert make_plan(shape(), shape(), layout).fits is False


@pytest.mark.parametrize(
    "in_round, in_prefill, largest, fits",
    [(60, 90, 90, True), (60, 110, 110, False), (110, 60, 110, False), (60, None, None, False)],
)
def test_a_prefill_that_does_not_fit_counts(in_round, in_prefill, largest, fits):
    def program(size: int | None) -> CompiledProgram:
        return CompiledProgram(size, 0, 0, 0, Counter(), Counter(), compile_seconds=1.0)

    layout = Layout("mine", (("model", 1),), "gpu", chip=Chip("small", 100.0, 1e9, 1e9, 1e9))
    found = make_plan(shape(), shape(), layout)
    assert found.compile_seconds is None
    compiled = dataclasses.replace(
        found,
        round=dataclasses.replace(found.round, program=program(in_round)),
        prefill=dataclasses.replace(found.prefill, program=program(in_prefill)),
    )
    assert (compiled.memory_bytes, compiled.fits) == (largest, fits)
    assert compiled.compile_seconds == 2.0


LLAMA = tuple(ROOT / f"checkpoints/llama-{size}.toml" for size in ("8b", "1b"))


def test_temporaries_decide_whether_a_batch_fits():
    """Weights and caches take 12.78 of 16 GiB."""
    found = plan(*map(read_shape, LLAMA), "tpu-v5e-8", batch=64, context=8192)
    held = found.round.weight_bytes + found.round.cache_bytes
    assert held / 2**30 == pytest.approx(12.78, abs=0.01)
    assert found.prefill.block == 128 and found.fits is True
    assert found.layout.chip is not None
    between = (found.round.memory_bytes + found.prefill.memory_bytes) / 2
    chip = dataclasses.replace(found.layout.chip, memory=between)
    less = dataclasses.replace(found, layout=dataclasses.replace(found.layout, chip=chip))
    assert held < between and less.fits is False


def test_prefill_takes_what_arithmetic_takes():
    """Two floating-point operations for each weight and token, and attention."""
    target, draft = map(read_shape, LLAMA)
    found = plan(target, draft, "tpu-v5e-8", batch=8, context=8192)
    assert found.layout.chip and found.prefill.seconds
    weights = 8.03e9 - 2 * 128256 * 4096 + 0.97e9  # no embeddings, no heads
    scores = 32 * 4096 + 16 * 2048  # query widths of all layers
    tokens = 8 * 8192
    flops = 2 * weights * tokens + 4 * scores * tokens * 8192 / 2
    arithmetic = flops / 8 / found.layout.chip.flops
    links = 2 * 2 * found.layout.chip.link  # both directions of both dimensions
    summed = 2 * 7 / 8 * 2 * 4 * tokens * (32 * 4096 + 16 * 2048) / links
    assert found.prefill.seconds == pytest.approx(arithmetic + summed, rel=0.1)
    # One of eight rows is read at a time while others decode.
    assert found.prefill.joining_bytes == pytest.approx(found.round.cache_bytes / 8, rel=0.01)


def test_experts_take_what_arithmetic_takes():
    """Of Mixtral 8x22B, four rows: each layer reads 8 (1 - (6/8)^4) of its experts on average."""
    expert, head = 3 * 6144 * 16384, 32768 * 6144
    attention = 2 * 6144 * (48 + 8) * 128
    target = read_shape(ROOT / "checkpoints/mixtral-8x22b.toml")
    assert parameter_count(target.config) == pytest.approx(140.63e9, rel=1e-3)
    found = plan(target, shape(), "tpu-v5p-16", batch=4, context=8192)
    assert found.layout.chip and found.target_call.terms
    read = 2 * (56 * (8 * (1 - 0.75**4) * expert + attention) + head) / 16
    seconds = found.target_call.terms.weights
    assert seconds == pytest.approx(read / found.layout.chip.bandwidth, rel=0.02)
    qwen = read_shape(ROOT / "checkpoints/qwen3-235b-a22b.toml")
    assert parameter_count(qwen.config) == pytest.approx(235.09e9, rel=1e-3)


def test_sampling_adds_exchanges():
    """At four draft tokens, and at the target's five places together."""

    def exchanges(**options) -> dict[str, int]:
        sampling = SamplingParams(**options)
        found = plan(shape(), shape(num_layers=1), "tpu-v6e-8", sampling=sampling)
        models, added = found.scoring.collectives["all-reduce"] + 4 * 3, found.sampling.collectives
        assert found.round.collectives == added | {"all-reduce": models + added["all-reduce"]}
        # 2 x 4 chips: an all-reduce takes eight hops, an all-to-all four.
        whole, half = (added["all-reduce"] + added.get("all-gather", 0), added.get("all-to-all", 0))
        hops = 8e-6 * whole + 4e-6 * half
        assert found.sampling.seconds == pytest.approx(hops, rel=0.01)
        return added

    assert exchanges() == exchanges(top_k=50) == {"all-reduce": 2 * 5}  # nothing to cut
    assert exchanges(temperature=1.0) == {"all-reduce": 4 * 8 + 6, "all-gather": 2}
    cut = {"all-reduce": 4 * 4 + 2, "all-gather": 2, "all-to-all": 2 * 5}
    assert exchanges(temperature=1.0, top_k=50) == cut
    assert exchanges(temperature=1.0, top_k=50, top_p=0.9) == cut


def test_chinchilla_on_sixteen_v4_chips():
    recipes = (
        ROOT / f"checkpoints/{name}.toml" for name in ("chinchilla-70b", "chinchilla-draft-4b")
    )
    shapes = [read_shape(recipe) for recipe in recipes]
    found = plan(*shapes, "tpu-v4-16")
    assert found.target_call.collectives == {"all-reduce": 161}
    assert found.draft_step.collectives == {"all-reduce": 17}
    terms = found.target_call.terms
    assert terms is not None
    assert terms.weights == pytest.approx(2 * 64.95e9 / 16 / 1.228e12, rel=0.01)
    nucleus = plan(*shapes, "tpu-v4-16", sampling=SamplingParams(temperature=1.0, top_p=0.8))
    assert nucleus.round.collectives["all-reduce"] <= 300
    assert nucleus.round.seconds and found.round.seconds
    assert nucleus.round.seconds < 1.05 * found.round.seconds
    # A floor: what was published takes longer.
    for section, milliseconds in ((found.target_call, 14.1), (found.draft_step, 1.8)):
        assert section.seconds is not None and section.seconds < milliseconds / 1000
    assert found.target.published and found.target.published.ms_per_token == 14.1
    assert found.fits is True


@pytest.mark.parametrize(
    "options, said",
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0; give at least 1"),
        ({"batch": 0}, "batch is 0"),
        ({"context": 513}, "context is 513, but tiny was made for 512 tokens; give at most 512"),
        ({"acceptance": 1.5}, "acceptance is 1.5"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
        ({"quantization": "auto"}, "quantization is 'auto'; choose one of none, int8, int4, gguf"),
        ({"quantization": "gguf"}, "quantization is 'gguf', but tiny is not a .gguf file"),
        ({"method": "suffix"}, "method is 'suffix'; choose one of draft_model, early_exit"),
        ({"method": "none"}, "the draft is tiny, but method 'none' does without a draft model"),
        ({"early_exit_layers": 1}, "early_exit_layers is 1, which method 'early_exit' takes"),
    ],
)
def test_what_cannot_be_planned(options, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        plan(shape(), shape(), **options)


def test_what_cannot_be_compiled(monkeypatch):
    with pytest.raises(
        ConfigError, match=r"8 gpu devices, and there are 0; compile where they are"
    ):
        plan(shape(), shape(), "gpu-8", compile=True)
    with pytest.raises(ConfigError, match=r"32 cpu devices, .* set JAX_NUM_CPU_DEVICES=32 before"):
        make_plan(shape(), shape(), Layout.tensor_parallel(32), compile=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "spec-jax\[tpu\]"'):
        plan(shape(), shape(), "tpu-v4-16", compile=True)
    chip = Chip("v9", 1.0, 1.0, 1.0, 1.0)
    nameless = Layout("mine", (("model", 1),), "tpu", chip=chip)
    with pytest.raises(ConfigError, match="layout mine does not name the slice to compile for"):
        make_plan(shape(), shape(), nameless, compile=True)


def test_a_derived_draft_is_never_wider_than_its_target():
    layout = Layout.read(ROOT / "sharding/cpu-8.toml")
    odd = shape(num_heads=9, num_kv_heads=3)
    assert derived_draft(odd, layout).config.num_heads == 6
    assert derived_draft(shape(), layout).config.num_heads == 16
