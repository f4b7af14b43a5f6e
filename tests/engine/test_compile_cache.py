"""Compiled programs are kept for the next process."""

import os
import subprocess
import sys

import jax
import pytest

from spec_jax.config import cache_directory
from spec_jax.engine import compile_cache
from spec_jax.kernels import native
from tests.checkpoints.tiny import write_directory

DECODE = """
import sys
import jax
from jax import monitoring
from spec_jax import LLM

read = []
monitoring.register_event_listener(lambda name, **_: read.append(name))
LLM(sys.argv[1]).generate("the inn")
print(read.count("/jax/compilation_cache/cache_hits"), jax.config.jax_compilation_cache_dir)
"""


def decode(model, cache, messages=0):
    kept = {name: value for name, value in os.environ.items() if "COMPILATION_CACHE" not in name}
    result = subprocess.run(
        [sys.executable, "-c", DECODE, str(model)],
        capture_output=True,
        text=True,
        check=True,
        env=kept | {"SPEC_JAX_CACHE": str(cache)},
    )
    assert result.stderr.count("a compiled program in ") == messages, result.stderr
    assert messages or result.stderr == ""
    hits, folder = result.stdout.split()
    return int(hits), folder


@pytest.fixture
def cache(tmp_path):
    """A cache without programs."""
    cache = tmp_path / "cache"
    if native.available():  # native code need not be built again
        cache.mkdir()
        (cache / "native").symlink_to(cache_directory() / "native")
    return cache


@pytest.mark.slow
def test_a_second_process_reads_what_the_first_compiled(cache, tmp_path):
    model = write_directory(tmp_path / "model")
    hits, folder = decode(model, cache)
    kept = [path for path in (cache / "xla").rglob("*") if path.is_file()]
    assert hits == 0 and folder.startswith(str(cache / "xla")) and kept
    assert decode(model, cache)[0] >= 1


@pytest.mark.slow
def test_damaged_programs_are_compiled_again(cache, tmp_path):
    model = write_directory(tmp_path / "model")
    decode(model, cache)
    for program in (cache / "xla").rglob("*-cache"):
        program.write_bytes(program.read_bytes()[:-100])
    assert decode(model, cache, messages=1)[0] == 0
    assert decode(model, cache)[0] >= 1  # what compiles in an instant is not kept


def test_a_cache_of_jaxs_own_is_left_alone(tmp_path):
    chosen = jax.config.jax_compilation_cache_dir
    assert chosen is not None
    compile_cache.keep_programs(tmp_path / "xla")
    assert jax.config.jax_compilation_cache_dir == chosen and not (tmp_path / "xla").exists()


@pytest.mark.parametrize("inside", [False, True])
def test_a_folder_that_cannot_be_made_is_no_error(inside, monkeypatch, tmp_path):
    monkeypatch.setitem(jax.config.values, "jax_compilation_cache_dir", None)
    changed = []
    monkeypatch.setattr(jax.config, "update", lambda name, value: changed.append(name))
    file = tmp_path / "file"
    file.write_text("")
    compile_cache.keep_programs(file / "inside" if inside else file)
    assert changed == ["jax_persistent_cache_enable_xla_caches"]
