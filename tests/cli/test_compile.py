"""`spec-jax compile`: another process finds the programs."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spec_jax.checkpoints.draft_directory import MANIFEST
from spec_jax.cli import compile
from tests.checkpoints.tiny import write_directory
from tests.cli.harness import failure

LAYOUT = Path(__file__).parents[2] / "sharding" / "cpu-8.toml"


def spec_jax(*arguments, cache: Path) -> str:
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_COMPILATION_CACHE_MAX_SIZE": "-1",
    }
    command = [sys.executable, "-m", "spec_jax", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
    assert done.returncode == 0, done.stderr
    return done.stderr


def programs(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("jit_counted-*-cache")}


def test_generate_finds_the_programs(tmp_path):
    model, folder = write_directory(tmp_path / "tiny"), tmp_path / "programs"
    common = ("--target", model, "--draft", model, "--layout", LAYOUT, "--dtype", "float32")
    common += ("--max-tokens", "12", "--num-speculative-tokens", "2", "--temperature", "0.7")
    said = spec_jax(
        *("compile", *common, "--prompt-tokens", "20,60", "--out", folder), cache=tmp_path / "other"
    )
    (damaged := next(folder.glob("*-cache"))).write_bytes(b"half")
    spec_jax("compile", *common, "--prompt-tokens", "20,60", "--out", folder, cache=folder)
    assert damaged.stat().st_size > 4 and not list(folder.glob(".*"))
    assert "3 programs in " in said and str(folder) in said  # both share the decoding loop
    before = programs(folder)
    assert len(before) == 3 and not programs(tmp_path / "other")
    shipped = folder.rename(tmp_path / "shipped")
    spec_jax("generate", "the inn", *common, "--ignore-eos", cache=shipped)
    assert programs(shipped) == before


def test_a_full_folder_is_an_error_and_leaves_no_part_of_a_program(tmp_path, monkeypatch):
    made, kept = tmp_path / "made", tmp_path / "kept"
    for folder in (made, kept):
        folder.mkdir()
    (made / "a-cache").write_bytes(b"program")

    def full(source, target):
        Path(target).write_bytes(b"pro")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OSError, match="No space left"):
        compile.publish(made, kept)
    assert not list(kept.iterdir()) and list(made.iterdir())


def flags(tmp_path, **others):
    given = {"target": tmp_path, "layout": LAYOUT, "prompt_tokens": 20, "out": tmp_path / "out"}
    given = {name: value for name, value in (given | others).items() if value is not None}
    return [
        part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)
    ]


MISTAKES = [
    ({"target": None}, "no target given; name the target model with --target"),
    ({"layout": None}, "no layout given; name the layout with --layout"),
    ({"prompt_tokens": None}, "no prompt tokens given; name the tokens of your prompts"),
    ({"prompt_tokens": "20,0"}, "prompt_tokens.1 is 0; it should be at least 1"),
    ({"prompt_tokens": "many"}, "'many' is not an integer"),
    ({"prompt_tokens": "1-1000000000000"}, "is not 1 to 1000 numbers, such as 1,2,4 or 1-4"),
    ({"prompt_tokens": "5-2"}, "'5-2' is not 1 to 1000 numbers"),
    ({"num_prompts": 0}, "num_prompts is 0; it should be at least 1"),
    ({"dtype": "float16"}, "dtype is 'float16'. Did you mean"),
    ({"quantization": "auto"}, "quantization is 'auto'. Known:"),
    ({"quantization": "gguf"}, "quantization is 'gguf', but tiny is not a .gguf file"),
    ({"temperature": -1}, "temperature is -1"),
    ({"method": "suffix"}, "method is 'suffix', whose programs depend on more"),
    ({"draft": "draft"}, "was trained to propose some tokens of one target"),
    ({"layout": "cpu-nowhere"}, "cpu-nowhere"),
    ({"layout": "gpu-8"}, "layout gpu-8 is for GPUs, whose compiler measures on them"),
]


@pytest.mark.parametrize("given, said", MISTAKES, ids=[said for _, said in MISTAKES])
def test_a_mistake_is_named(capsys, monkeypatch, tmp_path, given, said):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr("jax.config.update", lambda *_: None)  # is for the whole process
    model = write_directory(tmp_path / "tiny")
    draft = write_directory(tmp_path / "draft")
    (draft / MANIFEST).write_text("{}")
    given = given | ({"draft": draft} if "draft" in given else {})
    assert said in failure(capsys, "compile", *flags(model, **given))
    assert not (model / "out").exists()


def test_the_folder_is_named(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    said = failure(capsys, "compile", *flags(tmp_path, out=None))
    assert said.startswith("no folder given; name the programs' with --out, or set JAX_COMP")
