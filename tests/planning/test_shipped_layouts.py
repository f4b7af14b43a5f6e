"""No shipped layout is slower by the cost model than what could stand in its place."""

from pathlib import Path

import pytest

from spec_jax.checkpoints.shape import read_shape
from spec_jax.planning import search
from spec_jax.sharding import Layout
from tests.often import often

ROOT = Path(__file__).parents[2]
TARGET, DRAFT = (
    read_shape(ROOT / "checkpoints" / f"chinchilla-{name}.toml") for name in ("70b", "draft-4b")
)
"""The reference pair: 70B of 80 layers, with a wide and shallow draft of 4B in 8 layers."""
LAYOUTS = [
    layout
    for file in sorted((ROOT / "sharding").glob("*.toml"))
    if (layout := Layout.read(file)).chip is not None
]
OFTEN = [each for each in LAYOUTS if each.name in ("gpu-1", "tpu-v5e-16", "tpu-v5e-64")]


def candidates(layout: Layout, lookaheads: tuple[int, ...] = (4,)):
    """With the draft on groups of 1, 2, 4, .. of the devices of a row, up to all."""
    rows = (dict(layout.mesh)["data"],)
    return search(TARGET, DRAFT, layout, batches=rows, lookaheads=lookaheads).candidates


@pytest.mark.parametrize("layout", often(LAYOUTS, OFTEN), ids=lambda layout: layout.name)
def test_no_alternative_is_much_faster(layout):
    """Neither at K = 4 nor at the best K of each."""
    for lookaheads in ((4,), (2, 3, 4, 5, 6, 8)):
        found = candidates(layout, lookaheads)
        best = max(found, key=lambda each: each.tokens_per_second)
        given = max(each.tokens_per_second for each in found if each.is_given)
        assert best.tokens_per_second <= 1.05 * given, best.layout.name


def test_there_are_alternatives():
    (layout,) = (each for each in LAYOUTS if each.name == "tpu-v5e-16")
    found = sorted(candidates(layout), key=lambda each: each.draft_chips)
    assert [each.draft_chips for each in found] == [1, 2, 4, 8, 16]
    times = [each.round_seconds for each in found]
    assert times == sorted(times, reverse=True) and times[0] > 2 * times[-1]
