"""Plans of offloaded targets, against figures worked out by hand and published ones."""

import dataclasses
import re
from pathlib import Path

import jax.numpy as jnp
import pytest

from spec_jax.checkpoints.shape import Shape, read_shape
from spec_jax.engine.offloading import offloaded
from spec_jax.errors import ConfigError
from spec_jax.models.sizes import parameter_count
from spec_jax.planning import cost, make_plan
from spec_jax.planning.abstract import abstract_model, stand_ins
from spec_jax.planning.cost import Call, Weights
from spec_jax.sharding import Chip, Layout
from tests.cli.harness import failure, run
from tests.planning.shapes import shape

ROOT = Path(__file__).parents[2]
CHIP = Chip("mine", memory=1e9, bandwidth=1e9, flops=1e9, link=1e6, host=1e6)
MATRICES = 4 * 256 * 16 * 128 + 3 * 256 * 512
"""Weights of the matrices of a block of `shape`."""


def call(resident: int = 0, offload: str = "host", **changes) -> Call:
    layout = Layout.tensor_parallel(8)
    config = shape(num_layers=5, **changes).config
    placement = layout.place("target", config.axis_sizes, stand_ins(layout))
    placement = offloaded(placement, config, offload, resident)
    weights = Weights(abstract_model(config, jnp.bfloat16, "none", placement))
    return Call.of(weights, weights.cache(1, 64, 64, jnp.bfloat16), 1)


def test_bytes_of_a_chip_and_its_host():
    whole, away, some = call(offload="none"), call(), call(resident=3)
    block = 2 * MATRICES // 8
    assert (whole.host_bytes, away.host_bytes, some.host_bytes) == (0, 5 * block, 2 * block)
    # Two blocks are on the chip at a time.
    assert away.weight_bytes == whole.weight_bytes - 3 * block
    assert some.weight_bytes == whole.weight_bytes
    # What is copied to the chip's memory is read there as before.
    assert away.weight_bytes_read == whole.weight_bytes_read and away.flops == whole.flops


def test_copies_take_their_time_or_nothing():
    found = call()
    slow = found.terms("gpu", CHIP)
    assert slow.stream == found.host_bytes / 1e6 and slow.total == slow.stream
    fast = found.terms("gpu", dataclasses.replace(CHIP, host=1e12))
    assert fast.total == call(offload="none").terms("gpu", CHIP).total > fast.stream


def test_a_round_copies_the_target_once():
    layout = dataclasses.replace(Layout.tensor_parallel(1), platform="gpu", chip=CHIP)
    found = make_plan(shape(), shape(num_layers=1), layout, offload="host")
    assert found.round.host_bytes == found.target_call.host_bytes == 2 * 2 * MATRICES
    assert found.draft_step.host_bytes == 0
    assert found.round.terms and found.target_call.terms
    assert found.round.terms.stream == found.target_call.terms.stream
    # Bound by the copies, plain decoding and scoring take as long.
    assert found.scoring.seconds == found.target_call.seconds
    written = found.as_dict()
    assert (written["offload"], written["resident_layers"]) == ("host", 0)
    assert written["round"]["computed"]["host_bytes"] == found.round.host_bytes


@pytest.mark.parametrize(
    "options, said",
    [
        ({"offload": "disk"}, "offload is 'disk'; choose one of none, host"),
        ({"resident_layers": 1}, "resident_layers is 1, but offload is 'none'"),
        ({"offload": "host", "resident_layers": 3}, "resident_layers is 3, but the target has 2"),
        ({"offload": "host"}, "add host_gb_per_s under [chip], such as 32"),
    ],
)
def test_what_cannot_be_planned(options, said):
    chip = dataclasses.replace(CHIP, host=None)
    layout = dataclasses.replace(Layout.tensor_parallel(1), platform="gpu", chip=chip)
    if "resident_layers" in options:
        layout = dataclasses.replace(layout, chip=CHIP)
    with pytest.raises(ConfigError, match=re.escape(said)):
        make_plan(shape(), shape(), layout, **options)


def test_every_layout_with_a_chip_says_how_fast_it_reads_host_memory():
    for file in (ROOT / "sharding").glob("*.toml"):
        chip = Layout.read(file).chip
        assert chip is None or (chip.host and chip.host < chip.bandwidth / 10), file


def opt_66b() -> tuple[Shape, Shape, Layout]:
    """With OPT-125M on one A100, as Hugging Face's assisted generation would have it."""
    target, draft = (read_shape(ROOT / f"checkpoints/opt-{size}.toml") for size in ("66b", "125m"))
    return target, draft, Layout.read(ROOT / "sharding/gpu-1-a100.toml")


def test_opt_66b_on_80_gigabytes():
    """It does not fit there, but in host memory: four seconds a token."""
    target, draft, layout = opt_66b()
    assert parameter_count(target.config) == 65_719_683_072
    assert parameter_count(draft.config) == 125_237_760
    found = make_plan(target, draft, layout, offload="host")
    assert found.fits and found.round.weight_bytes < 6e9
    assert found.target_call.seconds == pytest.approx(2 * 65.2e9 / 32e9, rel=0.01)
    # With a draft that costs nothing beside it, a round takes as long as a token.
    assert found.speedup == pytest.approx(found.tokens_per_round, rel=0.001)
    assert found.best and found.best[0] == cost.MAX_LOOKAHEAD


PUBLISHED = {"open text": (2616.0, 1099.0), "summaries": (2732.0, 331.2)}
"""Milliseconds a token, plain and assisted, of OPT-30B in float16 on an RTX 3090 of 24 GB with
OPT-125M as assistant and layers in host memory: huggingface.co/spaces/joaogante/
assisted_generation_benchmarks, data.csv, the figures behind Hugging Face's post "Assisted
Generation" of 2023-05-11, which says "up to 10x" of models that rely on offloading."""


def test_published_times_of_an_offloaded_target():
    """The projection is a floor of the times, and speed-ups are the tokens that a call keeps."""
    target, draft, _ = opt_66b()
    config = dataclasses.replace(
        target.config.resized(48), embed_size=7168, num_heads=56, num_kv_heads=56, mlp_size=28672
    )
    chip = Chip("RTX 3090", 24 * 2**30, 936e9, 71e12, 1e9, host=32e9)  # PCIe 4.0 x16
    layout = dataclasses.replace(Layout.tensor_parallel(1), platform="gpu", chip=chip)
    target = dataclasses.replace(target, config=config)
    options = {"offload": "host", "resident_layers": 13, "context": 256}
    found = make_plan(target, draft, layout, num_speculative_tokens=16, **options)
    assert found.fits and found.target_call.seconds == pytest.approx(1.35, abs=0.01)
    for plain, assisted in PUBLISHED.values():
        assert 1.35 < plain / 1000 < 2.1 * 1.35
        low, high = (cost.tokens_per_round(acceptance, 16) for acceptance in (0.5, 0.95))
        assert low < plain / assisted < high


def test_a_plan_for_people(capsys):
    files = {
        "--target": ROOT / "checkpoints/opt-66b.toml",
        "--draft": ROOT / "checkpoints/opt-125m.toml",
        "--layout": ROOT / "sharding/gpu-1-a100.toml",
    }
    flags = [str(part) for pair in files.items() for part in pair]
    code, out, err = run(capsys, "plan", *flags, "--offload", "host", "--resident-layers", "25")
    assert (code, err) == (0, "")
    words = " ".join(out.split())
    assert "39 layers in host memory" in words and "It fits" in words
    lines = {line[:27].strip(): line[27:].split() for line in out.splitlines()}
    assert lines["weights in host memory, GiB"] == ["74.04", "74.04", "0.00", "74.04"]
    assert lines["host memory meanwhile, ms"][0] == lines["projection, ms"][0] == "2484.339"
    assert "offload is 'hst'. Did you mean" in failure(capsys, "plan", *flags, "--offload", "hst")
