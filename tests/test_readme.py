"""The table of families is made from the registry, and the README fits two screens."""

import re

import pytest

pytest.importorskip("transformers")

from benchmarks.families import BEGIN, END, HEAD, PAGE, facts
from spec_jax.models.registry import FAMILIES


def test_the_table_of_families_is_the_registry():
    text = PAGE.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    inside = text.partition(BEGIN)[2].partition(END)[0].strip()
    head, rule, *rows = (re.split(r" *\| *", line.strip("| ")) for line in inside.splitlines())
    assert tuple(head) == HEAD and set(rule) == {"---"}
    table = {row[0]: row for row in rows}
    assert len(table) == len(rows)
    expected = {facts(family)[0]: facts(family) for family in FAMILIES}
    assert list(table) == sorted(expected, key=lambda name: name.strip("`"))
    for name, row in table.items():
        assert tuple(row[:-1]) == expected[name]
        assert float(row[-1]) <= 1e-4


def test_the_readme_is_short():
    assert len((PAGE.parents[1] / "README.md").read_text().splitlines()) <= 150
