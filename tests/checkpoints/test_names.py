"""Models and layouts by the names under which spec-jax comes with them, wherever one stands."""

from pathlib import Path

import pytest

from spec_jax import CheckpointError, ConfigError, Layout, checkpoints
from spec_jax.checkpoints import memory
from spec_jax.checkpoints.packing import Packing
from spec_jax.checkpoints.reference import draft_form, locate, recipe_names
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


def test_files_that_lie_here_are_no_known_models(tmp_path, monkeypatch):
    """Nor are shapes without weights, which would decode nonsense."""
    (tmp_path / "pictures").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as error:
        locate("unknown", print)
    assert "pictures" not in str(error.value) and "llama-70b" not in str(error.value)
    with pytest.raises(CheckpointError, match="Did you mean 'pictures'"):
        locate("picture", print)


@pytest.mark.parametrize("ending", ["", ".toml"])
@pytest.mark.parametrize("lookup", [draft_form, lambda name: locate(name, print)])
def test_a_name_too_long_for_the_disk_is_refused(lookup, ending):
    name = "a" * 300 + ending
    with pytest.raises(CheckpointError, match=f"^{name} cannot be read: File name too long"):
        lookup(name)


def shape_recipe(path, **sizes):
    """A recipe of random weights."""
    sizes = {"vocab_size": 300, "embed_size": 8, "num_layers": 1, "num_heads": 1} | sizes
    sizes |= {"mlp_size": 8, "num_kv_heads": 1, "head_dim": 8, "max_position": 64}
    lines = (f"{name} = {value}" for name, value in sizes.items())
    path.write_text("\n".join(['name = "tiny"', "[shape]", *lines]))
    return str(path)


def test_a_shape_says_that_its_weights_are_random(tmp_path):
    with pytest.warns(UserWarning, match="tiny is a shape with random weights"):
        checkpoints.load(shape_recipe(tmp_path / "tiny.toml"), dtype="float32")


@pytest.mark.filterwarnings("ignore:tiny is a shape")
def test_weights_that_do_not_fit_into_memory_are_refused(tmp_path, monkeypatch):
    large = shape_recipe(tmp_path / "large.toml", vocab_size=2**20, embed_size=2**18)
    with pytest.raises(ConfigError, match=r"weights of tiny take 2048\.\d GiB .* are free"):
        checkpoints.load(large, dtype="float32")
    # A checkpoint is refused before it is read, and passes if it is kept in fewer bits.
    path = str(write_directory(tmp_path / "stored"))
    model = checkpoints.load(path, dtype="float32").model
    count = sum(weight.size for weight in model.weights.values())
    monkeypatch.setattr(memory, "free_memory", lambda devices: 2 * count)
    with pytest.raises(ConfigError, match="use fewer bits"):
        checkpoints.load(path, dtype="float32")
    checkpoints.load(path, dtype="float32", packing=Packing("int8"))
    # Random weights are looked at before they take memory, and not once more.
    free = iter([10**6])
    monkeypatch.setattr(memory, "free_memory", lambda devices: next(free))
    checkpoints.load(shape_recipe(tmp_path / "small.toml"), dtype="float32")
    assert not [*free]


def test_a_plan_by_names(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--target", "chinchilla-70b", "--layout", "tpu-v4-16"]) == 0
    assert "chinchilla-70b" in capsys.readouterr().out
