"""Models and layouts by the names under which spec-jax comes with them, wherever one stands."""

from pathlib import Path

import pytest

from spec_jax import CheckpointError, ConfigError, Layout
from spec_jax.checkpoints.reference import locate, recipe_names
from spec_jax.checkpoints.shape import read_shape
from spec_jax.cli import main
from tests.checkpoints.tiny import write_directory

ROOT = Path(__file__).resolve().parents[2]


def test_every_recipe_has_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = sorted(file.stem for file in (ROOT / "checkpoints").glob("*.toml"))
    assert recipe_names() == files and "smollm2-135m-instruct" in files
    assert read_shape("opt-125m").name == "opt-125m"
    name, path = locate("smollm2-135m-instruct-draft", print)
    assert name == "smollm2-135m-instruct-draft" and (path / "model.safetensors").is_file()
    assert Layout.read("cpu-8") == Layout.read(ROOT / "sharding" / "cpu-8.toml")


def test_what_lies_here_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_directory(tmp_path / "opt-125m")
    assert locate("opt-125m", print) == ("opt-125m", Path("opt-125m"))


def test_an_unknown_name_lists_those_that_are_known(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"gemma3-270m.*smollm2-135m-instruct.*whisper-base"):
        locate("unknown", print)
    with pytest.raises(CheckpointError, match="Did you mean 'smollm2-135m-instruct'"):
        locate("smolm2-135m-instruct", print)
    with pytest.raises(ConfigError, match=r"or one of cpu-1, .*tpu-v6e-8"):
        Layout.read("cpu-3")


def test_a_plan_by_names(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--target", "chinchilla-70b", "--layout", "tpu-v4-16"]) == 0
    assert "chinchilla-70b" in capsys.readouterr().out
