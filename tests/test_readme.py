"""The README's table of families is the registry's."""

import re

import pytest

pytest.importorskip("transformers")

from benchmarks.families import BEGIN, END, HEAD, README, facts
from spec_jax.models.registry import FAMILIES


def test_the_table_of_families_is_the_registry():
    text = README.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    inside = text.partition(BEGIN)[2].partition(END)[0].strip()
    head, rule, *rows = (re.split(r" *\| *", line.strip("| ")) for line in inside.splitlines())
    assert tuple(head) == HEAD and set(rule) == {"---"}
    found = {row[0]: row for row in rows}
    assert len(found) == len(rows)
    expected = {facts(family)[0]: facts(family) for family in FAMILIES}
    assert list(found) == sorted(expected, key=lambda name: name.strip("`"))
    for name, row in found.items():
        assert tuple(row[:-1]) == expected[name]
        assert float(row[-1]) <= 1e-4
