"""Native code is built where that is possible; elsewhere one warning says what is missing."""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spec_jax.kernels import native
from tests.checkpoints.tiny import CONFIG, llama_tensors, write_directory
from tests.test_packaging import NOT_SOURCES, ROOT

needs_a_compiler = pytest.mark.skipif(
    not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")),
    reason="there is no C++ compiler",
)
VARIANTS = {
    "x86_64": ["avx512-bf16", "avx512-vnni", "avx512", "avx2-vnni", "avx2", "x86-64"],
    "aarch64": ["neon-dotprod", "neon"],
}
FILES = "tests/kernels/test_products.py", "tests/kernels/test_integer_products.py"
QUICK = "several_weights or different_formats or infinities or every_weight or overflow or nan"
QUICK += " or among_others"
SANITIZE = Path(__file__).parent / "cpu/sanitize.sh"
SANITIZED = subprocess.run([SANITIZE, "--kinds"], capture_output=True, text=True, check=True)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that has not used native code yet, with an empty cache."""
    monkeypatch.setattr(native, "_LOADED", [])
    monkeypatch.setenv("SPEC_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(native.SWITCH, raising=False)
    monkeypatch.delenv("CXX", raising=False)


def test_without_any_compiler_one_warning_names_two(fresh, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.warns(RuntimeWarning, match=r"slower.*such as g\+\+.*pip install ziglang") as seen:
        assert not native.available()
    assert not native.available()
    assert len(seen) == 1
    assert native.description().startswith("none: ")


def test_a_compiler_that_fails_is_named(fresh, monkeypatch, tmp_path):
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.warns(RuntimeWarning, match=r"broken cannot build them \(no such thing\)"):
        assert not native.available()


def test_a_cache_that_cannot_be_written_is_named(fresh, monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.warns(RuntimeWarning, match=r"cannot be written.*set SPEC_JAX_CACHE"):
        assert not native.available()


def copying_compiler(folder):
    """A compiler that copies the library which is in use to its last argument."""
    compiler, made = folder / "copying", native._built(None)
    lines = [
        "#!/bin/sh",
        f"echo built >> {folder}/builds",
        "for last; do :; done",
        f'cp {made} "$last"',
    ]
    compiler.write_text("\n".join(lines))
    compiler.chmod(0o755)
    return compiler


def truncated(library):
    library.write_bytes(library.read_bytes()[:-1])


def emptied(library):
    library.write_bytes(b"")


def one_bit_changed(library):
    data = bytearray(library.read_bytes())
    data[len(data) // 2] ^= 1
    library.write_bytes(data)


def without_its_checksum(library):
    library.with_suffix(".sha256").unlink()


def with_another_checksum(library):
    library.with_suffix(".sha256").write_bytes(b"\xff\x00")


DAMAGES = truncated, emptied, one_bit_changed, without_its_checksum, with_another_checksum


@pytest.mark.native
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda each: each.__name__)
def test_a_damaged_library_is_built_again(monkeypatch, tmp_path, damage):
    monkeypatch.setenv("CXX", str(copying_compiler(tmp_path)))
    monkeypatch.setenv("SPEC_JAX_CACHE", str(tmp_path / "cache"))
    said = []
    library = native._built(said.append)
    intact = library.read_bytes()
    assert native._built(said.append) == library and len(said) == 1
    damage(library)
    abandoned = library.parent / "building-by-a-killed-process"
    abandoned.mkdir()
    with pytest.warns(RuntimeWarning, match="was damaged, and is compiled again"):
        native._built(said.append)
    assert library.read_bytes() == intact and not abandoned.exists()
    assert native._built(said.append) == library and len(said) == 1
    assert (tmp_path / "builds").read_text() == "built\nbuilt\n"


@pytest.mark.native
def test_a_damaged_library_of_a_wheel_is_not_loaded(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(copying_compiler(tmp_path)))
    only = native._variant()
    monkeypatch.setattr(native, "_variants", lambda: (only,))
    native.prebuild(tmp_path / "prebuilt")
    monkeypatch.setattr(native, "_PREBUILT", tmp_path / "prebuilt")
    assert native._open_shipped() is not None
    (library,) = (tmp_path / "prebuilt").glob("*.so")
    truncated(library)
    assert native._open_shipped() is None


def test_it_can_be_turned_off(fresh, monkeypatch):
    monkeypatch.setenv(native.SWITCH, "0")
    assert not native.available()
    assert native.description() == "off (SPEC_JAX_NATIVE is 0)"


def test_a_variant_that_the_cpu_lacks_is_refused(fresh, monkeypatch):
    monkeypatch.setenv(native.SWITCH, "avx9")
    with pytest.warns(RuntimeWarning, match="SPEC_JAX_NATIVE is 'avx9'; this machine has "):
        assert not native.available()


@needs_a_compiler
@pytest.mark.slow  # the fastest variant computes in all other tests
@pytest.mark.parametrize("variant", VARIANTS.get(platform.machine(), []))
def test_every_variant_of_this_cpu_computes_right(variant):
    if not next(
        each.features <= native.cpu_features()
        for each in native._VARIANTS[platform.machine()]
        if each.name == variant
    ):
        pytest.skip(f"this CPU has no {variant}")
    # A library is registered once for a process.
    arguments = [*FILES, "-k", QUICK, "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        env=os.environ | {native.SWITCH: variant},
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert result.returncode == 0, result.stdout
    assert " passed" in result.stdout


SCRIPT = """
import sys
from spec_jax import LLM, SamplingParams
from spec_jax.kernels import native
found = LLM(sys.argv[1]).generate("in the inn", SamplingParams(max_tokens=8))[0]
print(native.description(), list(found.token_ids))
"""


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("ziglang"), reason="ziglang is not installed")
def test_zig_builds_where_there_is_no_other_compiler(tmp_path):
    model = write_directory(tmp_path / "model", CONFIG, llama_tensors(CONFIG))
    said = []
    for options in ({}, {"PATH": "", "SPEC_JAX_CACHE": str(tmp_path / "cache")}):
        result = subprocess.run(
            [sys.executable, "-W", "error", "-c", SCRIPT, str(model)],
            env=os.environ | options,
            capture_output=True,
            text=True,
            check=True,
        )
        said.append(result.stdout)
    assert said[0] == said[1]
    assert list((tmp_path / "cache/native").glob("*.so"))
    assert not list((tmp_path / "cache/native").glob("tmp*"))


@needs_a_compiler
@pytest.mark.slow
def test_a_wheel_may_bring_native_code(tmp_path):
    source, installed = tmp_path / "source", tmp_path / "installed"
    shutil.copytree(ROOT, source, ignore=NOT_SOURCES)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*command, "--no-index", "--wheel-dir", str(tmp_path), str(source)],
        env=os.environ | {"SPEC_JAX_PREBUILD": "1"},
        check=True,
    )
    (wheel,) = tmp_path.glob("spec_jax-*-py3-none-*.whl")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target"]
    subprocess.run([*command, str(installed), str(wheel)], check=True)
    cache = tmp_path / "cache"
    result = subprocess.run(
        [sys.executable, "-W", "error", "-m", "spec_jax", "env"],
        env=os.environ | {"PATH": "", "PYTHONPATH": str(installed), "SPEC_JAX_CACHE": str(cache)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert native.description() in result.stdout
    assert not (cache / "native").exists()


@needs_a_compiler
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", SANITIZED.stdout.splitlines())
def test_sanitizers_find_nothing(kind):
    """Addresses, undefined behaviour and races, for a kind of processor."""
    result = subprocess.run([SANITIZE, kind], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
