"""No shipped layout is slower by the cost model than what could stand in its place."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from spec_jax.checkpoints.shape import read_shape
from spec_jax.planning import make_plan
from spec_jax.sharding import Layout, Rule
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


def alternatives(layout: Layout) -> Iterator[Layout]:
    """The same target, its draft on groups of 1, 2, 4, .. of the devices of a row, up to all."""
    mesh, rules = dict(layout.mesh), dict(layout.target)
    whole = math.prod(mesh[axis] for axis in rules["heads"].axes)
    rows = math.prod(mesh[axis] for axis in rules["batch"].axes)

    def rules_over(*axes: str) -> tuple:
        return tuple((axis, rules[axis] if axis == "batch" else Rule(axes)) for axis in rules)

    for group in (2**i for i in range(whole.bit_length()) if whole % 2**i == 0):
        yield dataclasses.replace(
            layout,
            name=f"{layout.name}, draft on {group}",
            mesh=(("data", rows), ("outer", whole // group), ("inner", group)),
            target=rules_over("outer", "inner"),
            draft=rules_over("inner"),
        )


def seconds(layout: Layout) -> float:
    found = make_plan(TARGET, DRAFT, layout).round.seconds
    assert found is not None
    return found


@pytest.mark.parametrize("layout", often(LAYOUTS, LAYOUTS[::6]), ids=lambda layout: layout.name)
def test_no_alternative_is_much_faster(layout):
    best = min(alternatives(layout), key=seconds)
    assert seconds(layout) <= 1.05 * seconds(best), best.name


def test_there_are_alternatives():
    (layout,) = (each for each in LAYOUTS if each.name == "tpu-v5e-16")
    names = [each.name.rpartition(" ")[2] for each in alternatives(layout)]
    assert names == ["1", "2", "4", "8", "16"]
    times = [seconds(each) for each in alternatives(layout)]
    assert times == sorted(times, reverse=True) and times[0] > 2 * times[-1]
