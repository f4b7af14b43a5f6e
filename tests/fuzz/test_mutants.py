"""Damaged files of every kind, each some hundred times; `mutants.py` does many more."""

import pytest

from tests.fuzz import mutants

COUNTS = {
    "safetensors": 2000,
    "gguf": 2000,
    "model.bin": 500,
    "config": 2000,
    "unknown keys": 1000,
    "doubled keys": 1000,
    "tokenizer": 100,
    "template": 40,
    "recipe": 2000,
}


@pytest.mark.parametrize("kind", mutants.kinds())
def test_damage_is_refused_or_harmless(kind):
    outcomes = mutants.run(kind, COUNTS[kind])
    assert outcomes.keys() <= {"refused", "same"}, outcomes
    assert outcomes["refused"] > COUNTS[kind] / 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", mutants.kinds())
def test_much_damage_is_refused_or_harmless(kind):
    many = {"safetensors": 100_000, "gguf": 100_000, "model.bin": 30_000}
    outcomes = mutants.run(kind, many.get(kind, 5000 if kind != "template" else 1000), seed=1)
    assert outcomes.keys() <= {"refused", "same"}, outcomes


def test_a_fault_is_seen(monkeypatch):
    def opened(path, random):
        file, mutant, _ = mutants.recipe(path, random)
        return file, mutant, lambda: file.read_text(encoding="ascii") and None

    monkeypatch.setattr(mutants, "kinds", lambda: {"text": opened})
    assert mutants.run("text", 300)["CRASH UnicodeDecodeError"] > 10
