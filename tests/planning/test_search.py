"""The search finds what trying everything finds."""

import dataclasses
import itertools
import math
from pathlib import Path

import pytest

from spec_jax.errors import ConfigError
from spec_jax.planning import draft_layouts, make_plan, search
from spec_jax.planning.abstract import stand_ins
from spec_jax.sharding import Chip, Layout, Rule
from tests.planning.shapes import shape

ROOT = Path(__file__).parents[2]
TARGET, DRAFT = shape(num_layers=8, embed_size=2048, mlp_size=8192), shape(num_layers=1)
LAYOUT = Layout.read(ROOT / "sharding/tpu-v5e-16.toml")
GRID = {"batches": (1, 8), "contexts": (256, 512), "lookaheads": (1, 3)}


def test_the_best_is_that_of_all_plans():
    quantizations = ("none", "int8")
    found = search(TARGET, DRAFT, LAYOUT, quantizations=quantizations, **GRID)
    assert len(found.candidates) == 2 * 2 * 2 * 2 * len(list(draft_layouts(LAYOUT)))
    for best in found.best:
        plans = [
            make_plan(
                TARGET,
                DRAFT,
                layout,
                num_speculative_tokens=lookahead,
                batch=best.batch,
                context=best.context,
                quantization=best.quantization,
            )
            for layout, lookahead in itertools.product(draft_layouts(LAYOUT), GRID["lookaheads"])
        ]
        rates = [plan.batch * plan.tokens_per_round / plan.round.seconds for plan in plans]
        assert best.tokens_per_second == pytest.approx(max(rates))
        (same,) = (
            plan
            for plan in plans
            if plan.layout == best.layout
            and plan.num_speculative_tokens == best.num_speculative_tokens
        )
        assert (same.round.seconds, same.speedup) == (best.round_seconds, best.speedup)
        assert same.seconds_to_first_token == best.seconds_to_first_token
        assert same.memory_bytes == max(best.round_bytes, best.prefill_bytes)
    assert {each.key for each in found.best} == {
        *itertools.product(quantizations, GRID["contexts"], GRID["batches"])
    }


def test_rounded_sums_are_tried_beside_the_best():
    found = search(TARGET, DRAFT, LAYOUT, batches=(1, 64), contexts=(256,), lookaheads=(3,))
    for best, other in zip(found.best, found.rounded_sums, strict=True):
        layout = dataclasses.replace(best.layout, all_reduce_dtype="bfloat16")
        plan = make_plan(
            TARGET, DRAFT, layout, num_speculative_tokens=3, batch=best.batch, context=256
        )
        assert (other.key, other.round_seconds) == (best.key, plan.round.seconds)
        assert other.round_seconds < best.round_seconds
    assert 0 < found.rounded_gain[0] < found.rounded_gain[1]
    in_bfloat16 = dataclasses.replace(LAYOUT, all_reduce_dtype="bfloat16")
    for options in ({"dtype": "float32"}, {"layout": in_bfloat16}):
        job = {"layout": LAYOUT, "batches": (1,), "contexts": (256,), "lookaheads": (3,)}
        assert search(TARGET, DRAFT, **(job | options)).rounded_gain == []


def test_draft_layouts():
    given, *others = draft_layouts(LAYOUT)
    assert given is LAYOUT
    # On all sixteen it lies already.
    assert [each.name for each in others] == [f"tpu-v5e-16-draft-on-{n}" for n in (1, 2, 4, 8)]
    for each, chips in zip(others, (1, 2, 4, 8), strict=True):
        config = shape().config
        target, draft = (
            each.place(role, config.axis_sizes, stand_ins(each)) for role in ("target", "draft")
        )
        assert (target.num_shards("heads"), draft.num_shards("heads")) == (16, chips)


def test_a_layout_that_was_found_is_a_file(tmp_path):
    slow = dataclasses.replace(LAYOUT, draft=(("batch", Rule(("data",))),))
    found = search(TARGET, TARGET, slow, batches=(1,), contexts=(256,), lookaheads=(4,))
    (best,), (excess,) = found.best, found.excess
    assert excess > 0 and not best.is_given
    for layout in draft_layouts(slow):
        file = tmp_path / f"{layout.name}.toml"
        layout.write(file)
        assert Layout.read(file) == layout
    again = make_plan(
        TARGET, TARGET, Layout.read(tmp_path / f"{best.layout.name}.toml"), context=256
    )
    assert again.round.seconds == best.round_seconds
    with pytest.raises(ConfigError, match="cannot be written: No such file or directory"):
        best.layout.write(tmp_path / "nowhere" / "file.toml")


def test_batches_are_doubled_until_nothing_fits():
    found = search(TARGET, DRAFT, LAYOUT, lookaheads=(4,))
    batches = [each.batch for each in found.best]
    assert batches == [2**i for i in range(len(batches))]
    assert found.largest == {("none", 512): 1024}
    small = dataclasses.replace(LAYOUT.chip, memory=2.0**28)
    found = search(TARGET, DRAFT, dataclasses.replace(LAYOUT, chip=small), lookaheads=(4,))
    *fit, last = found.best
    assert not any(each.too_large for each in fit) and last.too_large
    assert found.largest == {("none", 512): fit[-1].batch}
    nothing = dataclasses.replace(LAYOUT.chip, memory=1.0)
    found = search(TARGET, DRAFT, dataclasses.replace(LAYOUT, chip=nothing), lookaheads=(4,))
    assert found.largest == {("none", 512): 0}
    (only,) = found.best
    assert only.too_large == ("round", "prefill")


def test_what_fits_comes_before_what_is_faster():
    """The draft on one chip is larger; with memory for neither, the faster is shown."""
    found = search(TARGET, DRAFT, LAYOUT, batches=(1,), contexts=(256,), lookaheads=(4,))
    by_rank = sorted(found.candidates, key=lambda each: each.rank)
    assert by_rank[-1] == found.best[0]
    smallest = min(max(each.round_bytes, each.prefill_bytes) for each in found.candidates)
    chip = dataclasses.replace(LAYOUT.chip, memory=float(smallest))
    tight = search(
        TARGET,
        DRAFT,
        dataclasses.replace(LAYOUT, chip=chip),
        batches=(1,),
        contexts=(256,),
        lookaheads=(4,),
    )
    assert not tight.best[0].too_large
    assert math.isclose(max(tight.best[0].round_bytes, tight.best[0].prefill_bytes), smallest)


def test_a_layout_without_figures_is_refused():
    with pytest.raises(ConfigError, match="layout cpu-8 has no figures of its chip"):
        search(TARGET, DRAFT, Layout.read(ROOT / "sharding/cpu-8.toml"))


def test_layouts_that_are_not_varied():
    chip = Chip("mine", 1e9, 1e9, 1e9, 1e9)
    rules = (("experts", Rule(("expert",))), ("mlp", Rule(("model",))))
    experts = Layout("mine", (("expert", 4), ("model", 2)), "gpu", target=rules, chip=chip)
    assert list(draft_layouts(experts)) == [experts]
    alone = Layout("alone", (("data", 2),), "gpu", target=(("batch", Rule(("data",))),), chip=chip)
    assert list(draft_layouts(alone)) == [alone]
