"""Directories that `convert` writes: both ways, quantized, in little memory, or not at all."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from spec_jax import checkpoints
from spec_jax.checkpoints import hf_writer, orbax_directory
from spec_jax.checkpoints.checksums import CHECKSUMS
from spec_jax.checkpoints.gguf_file import GgufFile
from spec_jax.checkpoints.new_directory import new_directory
from spec_jax.checkpoints.opening import on_single_device, open_model
from spec_jax.checkpoints.packing import Packing
from spec_jax.config import CHECKPOINT_FORMATS
from spec_jax.errors import CheckpointError, ConfigError
from spec_jax.kernels import PackedWeight
from tests.checkpoints import llama_cpp
from tests.checkpoints.test_gguf_families import SHAPES
from tests.checkpoints.test_gguf_families import write_directory as write_family
from tests.checkpoints.tiny import CONFIG, llama_tensors, write_directory
from tests.kernels.test_integer_products import quantized
from tests.often import often
from tests.speech import write_speech_model

WIDE = CONFIG | {"hidden_size": 32, "intermediate_size": 64}


@pytest.fixture
def source(tmp_path):
    return write_directory(tmp_path / "tiny", WIDE, llama_tensors(WIDE))


def same(one, other):
    weights = [checkpoints.load(path).model.weights for path in (one, other)]
    assert weights[0].keys() == weights[1].keys()
    return all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("name", ["falcon", "gpt2", "gemma3_text", "mixtral", "phi3", "bloom"])
def test_there_and_back(name, tmp_path):
    directory = write_family(name, tmp_path / "directory")
    checkpoints.convert(directory, tmp_path / "orbax")
    checkpoints.convert(tmp_path / "orbax", tmp_path / "back", format="safetensors")
    assert name in SHAPES and same(directory, tmp_path / "orbax")
    # Shapes of several families are written as the first that has them.
    assert same(directory, tmp_path / "back")


def test_a_gguf_file_becomes_either(tmp_path):
    file = llama_cpp.convert(
        write_family("qwen3", tmp_path / "directory"),
        tmp_path / "model.gguf",
        GGMLQuantizationType.Q8_0,
    )
    for form in ("orbax", "safetensors"):
        checkpoints.convert(file, tmp_path / form, format=form)
        assert same(file, tmp_path / form)
        tokenizers = [checkpoints.load(path).tokenizer for path in (file, tmp_path / form)]
        text = "the thin man's inn <|im_end|> é"
        assert tokenizers[0].encode(text) == tokenizers[1].encode(text)
        assert tokenizers[0].eos_token_ids == tokenizers[1].eos_token_ids


def test_speech_keeps_what_must_not_be_said(tmp_path):
    write_speech_model(tmp_path / "speech")
    expected = checkpoints.load(tmp_path / "speech").speech
    assert expected.suppressed == (257, 264)
    for form in ("orbax", "safetensors"):
        checkpoints.convert(tmp_path / "speech", tmp_path / form, format=form)
        assert checkpoints.load(tmp_path / form).speech == expected
        assert same(tmp_path / "speech", tmp_path / form)


@pytest.mark.parametrize("stored", [np.float32, np.float16, "bfloat16"])
def test_every_number_is_kept_unless_a_dtype_is_asked_for(stored, tmp_path):
    tensors = llama_tensors(WIDE, np.dtype(stored))
    directory = write_directory(tmp_path / "tiny", WIDE, tensors)
    checkpoints.convert(directory, tmp_path / "kept")
    model = open_model(tmp_path / "kept", "stored", Packing(), on_single_device)
    assert model.dtype == ("bfloat16" if stored == "bfloat16" else "float32")
    assert same(directory, tmp_path / "kept")
    checkpoints.convert(directory, tmp_path / "other", dtype="bfloat16", format="safetensors")
    loaded = checkpoints.load(directory, dtype="bfloat16").model.weights
    for name, weight in checkpoints.load(tmp_path / "other").model.weights.items():
        assert np.array_equal(weight, loaded[name].astype(np.float32))


@pytest.mark.native
@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.slow
def test_few_bits_are_written_as_they_are_rounded(bits, source, tmp_path):
    checkpoints.convert(source, tmp_path / bits, quantization=bits)
    now = checkpoints.load(source, packing=Packing(bits, native=True))
    then = checkpoints.load(tmp_path / bits, packing=Packing("auto", native=True))
    assert then.quantization == bits
    for name, weight in now.model.weights.items():
        other = then.model.weights[name]
        assert type(weight) is type(other)
        if isinstance(weight, PackedWeight):
            assert weight.format == other.format == bits.replace("int4", "uint4")
            assert np.array_equal(weight.values, other.values)
            assert np.array_equal(weight.scales, other.scales)
    # As plain numbers they are the same; and written again so, in either format.
    plain = checkpoints.load(tmp_path / bits)
    for name, weight in plain.model.weights.items():
        kept = then.model.weights[name]
        whole = kept.dequantize() if isinstance(kept, PackedWeight) else kept
        np.testing.assert_allclose(weight, whole, rtol=1e-6, atol=1e-7)
    checkpoints.convert(tmp_path / bits, tmp_path / "plain", format="safetensors")
    assert same(tmp_path / bits, tmp_path / "plain")
    checkpoints.convert(tmp_path / bits, tmp_path / "again")
    assert checkpoints.load(tmp_path / "again", packing=Packing("auto")).quantization == bits
    other = {"int8": "int4", "int4": "int8"}[bits]
    with pytest.raises(ConfigError, match=f"holds weights of {bits}; use {bits}, none"):
        checkpoints.load(tmp_path / bits, packing=Packing(other))


@pytest.mark.native
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q6_K"])
def test_blocks_of_a_gguf_file_are_kept(kind, tmp_path, monkeypatch):
    directory = write_family("llama", tmp_path / "directory")
    stored = GGMLQuantizationType["Q4_1" if kind.endswith("K") else kind]
    file = llama_cpp.convert(directory, tmp_path / "model.gguf", stored)
    if kind.endswith("K"):  # which no library for Python writes

        def read(self, name):
            shape = self.shapes[name]
            return quantized(kind, shape[1], shape[0], len(name)) if len(shape) == 2 else None

        monkeypatch.setattr(GgufFile, "read_quantized", read)
    checkpoints.convert(file, tmp_path / "orbax", quantization="gguf")
    packing = Packing("gguf", native=True, activations="int8")
    before, after = (checkpoints.load(each, packing=packing) for each in (file, tmp_path / "orbax"))
    assert after.quantization == "gguf"
    for name, weight in before.model.weights.items():
        other = after.model.weights[name]
        assert jax.tree.structure(weight) == jax.tree.structure(other)
        assert jax.tree.all(jax.tree.map(np.array_equal, weight, other))
        if isinstance(weight, PackedWeight):
            assert weight.format[-1] == kind[1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"format": "gguf"}, "format is 'gguf'; choose one of orbax, safetensors"),
        ({"format": "safetensors", "quantization": "int4"}, "use format orbax, or quantization"),
        ({"quantization": "gguf"}, "tiny is not a .gguf file"),
        ({"dtype": "float64"}, "dtype is 'float64'"),
    ],
)
def test_what_contradicts_itself_is_refused(options, said, source, tmp_path):
    with pytest.raises(ConfigError, match=said):
        checkpoints.convert(source, tmp_path / "out", **options)
    assert {file.name for file in tmp_path.iterdir()} == {"tiny"}


def test_several_files_hold_what_one_does(source, tmp_path, monkeypatch):
    monkeypatch.setattr(hf_writer, "SHARD_BYTES", 20_000)
    monkeypatch.setattr(orbax_directory, "_READ_AT_ONCE", 20_000)
    checkpoints.convert(source, tmp_path / "orbax")
    checkpoints.convert(tmp_path / "orbax", tmp_path / "back", format="safetensors")
    files = sorted(file.name for file in (tmp_path / "back").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert same(source, tmp_path / "back")
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)


MEASURE = """
import resource, sys
from spec_jax import checkpoints
from spec_jax.checkpoints import hf_writer, orbax_directory
tiny, source, orbax, back = sys.argv[1:]
hf_writer.SHARD_BYTES = orbax_directory._READ_AT_ONCE = 16 << 20
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
checkpoints.convert(tiny, orbax + "-tiny")
checkpoints.convert(orbax + "-tiny", back + "-tiny", format="safetensors")
before = peak()
checkpoints.convert(source, orbax)
first = peak()
checkpoints.convert(orbax, back, format="safetensors")
print(before, first - before, peak() - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(source, tmp_path):
    shape = WIDE | {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 24,
        "head_dim": 128,
    }
    large = write_directory(tmp_path / "large", shape, llama_tensors(shape))
    size = (large / "model.safetensors").stat().st_size
    names = [str(each) for each in (source, large, tmp_path / "orbax", tmp_path / "back")]
    found = subprocess.run(
        [sys.executable, "-c", MEASURE, *names], capture_output=True, text=True, check=True
    )
    _, there, back = map(int, found.stdout.split())
    assert size > 360e6 and same(large, tmp_path / "back")
    assert there < 0.5 * size and back < 0.5 * size, (size, there, back)


def test_a_changed_file_is_noticed(source, tmp_path):
    checkpoints.convert(source, tmp_path / "out", format="safetensors")
    listed = tmp_path / "out" / CHECKSUMS
    assert {line.split("  ")[1] for line in listed.read_text().splitlines()} == {
        file.name for file in (tmp_path / "out").iterdir() if file != listed
    }
    subprocess.run(["sha256sum", "--check", "--quiet", CHECKSUMS], cwd=tmp_path / "out", check=True)
    weights = tmp_path / "out" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1  # the least of a number's bits
    weights.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged: it is not the file"):
        checkpoints.load(tmp_path / "out")
    weights.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoints.load(tmp_path / "out")
    for line in ("nonsense", f"{'0' * 64}  ../other", f"{'0' * 64}  /etc/passwd"):
        listed.write_text(line)
        with pytest.raises(CheckpointError, match="line 1 is"):
            checkpoints.load(tmp_path / "out")


def test_a_failure_leaves_nothing(source, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("spec_jax.checkpoints.conversion.write_tokenizer", full)
    with pytest.raises(CheckpointError, match=r"out cannot be written: .*No space left"):
        checkpoints.convert(source, tmp_path / "out", format="safetensors")
    assert {file.name for file in tmp_path.iterdir()} == {"tiny"}


LIMITED = """
import resource, sys
from spec_jax.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
sys.exit(main(["convert", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("form", often(["orbax", "safetensors"], ["safetensors"]))
def test_a_limit_on_the_size_of_files_is_said(form, source, tmp_path):
    command = [sys.executable, "-c", LIMITED, str(source), str(tmp_path / "out"), "--format", form]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 2 and "Traceback" not in found.stderr, found.stderr
    assert "out cannot be written" in found.stderr
    assert {file.name for file in tmp_path.iterdir()} == {"tiny"}


def test_what_threads_still_write_is_removed(tmp_path):
    def write(partial):
        for number in range(20):
            file = partial / "deep" / str(number)
            with contextlib.suppress(OSError):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text("1")
            time.sleep(0.01)

    with pytest.raises(CheckpointError, match="disk"), new_directory(tmp_path / "out") as partial:
        thread = threading.Thread(target=write, args=[partial])
        thread.start()
        time.sleep(0.05)
        raise OSError("disk")
    thread.join()
    assert not list(tmp_path.iterdir())


def test_two_at_once(tmp_path):
    with new_directory(tmp_path / "out") as partial:
        (partial / "mine").write_text("1")
        with (
            pytest.raises(CheckpointError, match="is being written by another process"),
            new_directory(tmp_path / "out"),
        ):
            pass
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine"]
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


WAIT = """
import sys, time
from spec_jax import checkpoints
from orbax.checkpoint import v1
print("ready", flush=True)
sys.stdin.readline()
checkpoints.convert(sys.argv[1], sys.argv[2], format=sys.argv[3])
"""


def test_sigterm_leaves_nothing_behind(source, tmp_path):
    path, partial = tmp_path / "out", tmp_path / "out.partial"
    slowly = WAIT.replace("checkpoints.convert(", SLOWLY + "checkpoints.convert(")
    command = [sys.executable, "-c", slowly, str(source), str(path), "safetensors"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as begun:
        begun.stdin.write("\n")
        begun.stdin.flush()
        while not partial.exists() and begun.poll() is None:
            time.sleep(0.01)
        time.sleep(0.5)  # until the directory is locked: before, it stays, empty
        begun.terminate()
        assert begun.wait(60) == 143
    assert not path.exists() and not partial.exists()


SLOWLY = """
from spec_jax.checkpoints import new_directory
publish = new_directory._publish
new_directory._publish = lambda *paths: (time.sleep(30), publish(*paths))
"""
KILLS = [(form, moments) for form in CHECKPOINT_FORMATS for moments in (2, 8)]


@pytest.mark.parametrize(("form", "moments"), KILLS)
@pytest.mark.slow
def test_a_killed_conversion_leaves_no_half_checkpoint(form, moments, source, tmp_path):
    def begin(path):
        command = [sys.executable, "-c", WAIT, str(source), str(path), form]
        begun = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert begun.stdout.readline() == "ready\n"
        return begun

    begun = begin(tmp_path / "whole")
    start = time.monotonic()
    begun.communicate("\n")
    seconds = time.monotonic() - start
    assert begun.returncode == 0
    kept = 0
    for moment in range(moments):
        path = tmp_path / f"out{moment}"
        killed = begin(path)
        killed.stdin.write("\n")
        killed.stdin.flush()
        time.sleep(seconds * (moment + 0.5) / moments)
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        if path.exists():
            kept += 1
        else:
            checkpoints.convert(source, path, format=form)
        assert same(source, path) and not path.with_name(f"{path.name}.partial").exists()
    assert kept < moments
    assert os.listdir(tmp_path / "whole")
