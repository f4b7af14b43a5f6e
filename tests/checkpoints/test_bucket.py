"""Models in buckets of an object store."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from spec_jax import CheckpointError, checkpoints
from spec_jax.benchmarking.baselines import prepare_baselines
from spec_jax.checkpoints import bucket, safetensors_ranges
from spec_jax.checkpoints.bucket import is_url
from spec_jax.checkpoints.safetensors_ranges import RangedFile
from spec_jax.checkpoints.shape import read_shape
from spec_jax.errors import BenchmarkError
from spec_jax.sharding import Layout
from tests.checkpoints.tiny import CONFIG, llama_tensors, write_directory, write_gguf, write_json
from tests.object_store import upload

ROOT = Path(__file__).resolve().parents[2]
URL = "s3://models/team/tiny"


@pytest.fixture
def folder(tmp_path):
    return write_directory(tmp_path / "tiny", shards=2)


@pytest.fixture
def uploaded(store, folder):
    return upload(store, folder)


def weights(reference, **options) -> dict[str, np.ndarray]:
    model = checkpoints.load(reference, **options).model
    return {name: np.asarray(weight) for name, weight in model.weights.items()}


def error_of(url) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load(url)
    return str(caught.value)


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_model_in_a_bucket_is_the_one_on_the_disk(uploaded, folder, scheme):
    url = f"{scheme}://models/team/tiny"
    there, here = checkpoints.load(url), checkpoints.load(folder)
    assert (there.name, there.eos_token_ids) == (here.name, here.eos_token_ids)
    assert there.tokenizer.encode("in the") == here.tokenizer.encode("in the")
    jax.tree.map(np.testing.assert_array_equal, weights(url + "/"), weights(folder))


def test_weights_stay_in_the_bucket_and_small_files_are_copied_once(uploaded):
    reads = uploaded.reads
    weights(URL)
    _, copy = checkpoints.locate(URL, print)
    assert not list(copy.glob("**/*.safetensors"))
    assert {name for name, _ in reads} > {"config.json", "tokenizer.json"}
    reads.clear()
    weights(URL)
    assert {name.rpartition(".")[2] for name, _ in reads} == {"safetensors"}


def test_a_file_that_was_changed_is_copied_again_and_one_that_was_removed_goes(uploaded, folder):
    weights(URL)
    uploaded.objects["models/team/tiny/config.json"] = json.dumps(
        CONFIG | {"eos_token_id": 1}
    ).encode()
    del uploaded.objects["models/team/tiny/tokenizer_config.json"]
    assert checkpoints.load(URL).eos_token_ids == (1,)
    _, copy = checkpoints.locate(URL, print)
    assert not (copy / "tokenizer_config.json").exists()


def test_only_config_json_is_read_for_a_shape(uploaded, folder):
    assert read_shape(URL).config == read_shape(folder).config
    assert [name for name, _ in uploaded.reads] == ["config.json"]


def test_devices_share_what_is_read_and_rows_of_others_stay(store, tmp_path, monkeypatch):
    shape = CONFIG | {"vocab_size": 272}
    upload(store, write_directory(tmp_path / "tiny", shape, llama_tensors(shape)))
    monkeypatch.setattr(safetensors_ranges, "_MAX_SMALL_BYTES", 0)
    layout = Layout.tensor_parallel(8)

    def place(config):
        return layout.place("target", config.axis_sizes)

    whole = weights(tmp_path / "tiny")
    jax.tree.map(np.testing.assert_array_equal, weights(URL, place=place), whole)
    sizes = [size for name, size in store.reads if name == "model.safetensors"]
    assert sizes.count(272 // 8 * 16 * 4) == 16  # embedding and head, each in eight parts


def test_a_gguf_file_is_copied_once(store, tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf")
    store.objects["models/tiny.gguf"] = file.read_bytes()
    for _ in range(2):
        jax.tree.map(np.testing.assert_array_equal, weights("s3://models/tiny.gguf"), weights(file))
    assert [name for name, _ in store.reads] == ["tiny.gguf"]


PROCESS = """
import json, re, sys
import jax

from spec_jax import checkpoints
from spec_jax.checkpoints import bucket, orbax_directory
from spec_jax.errors import BenchmarkError
from spec_jax.sharding import Layout

url, number, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_num_cpu_devices", 1)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 4, number)
layout = Layout.tensor_parallel(4)
place = lambda config: layout.place("target", config.axis_sizes)
status = lambda: open("/proc/self/status").read()
memory = lambda name: int(re.search(name + r":\\s+(\\d+)", status())[1]) * 1024
bucket.BLOCK, orbax_directory._READ_AT_ONCE = 1 << 18, 1 << 24  # this model is small
checkpoints.load(url + "/small", dtype="bfloat16", place=place)
before = memory("VmRSS")
model = checkpoints.load(url + "/large", dtype="bfloat16", place=place).model
shards = [shard.data for each in model.weights.values() for shard in each.addressable_shards]
print(json.dumps({"part": sum(each.nbytes for each in shards), "peak": memory("VmHWM") - before}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["safetensors", "orbax"])
def test_four_processes_hold_little_more_than_their_parts(store, tmp_path, form):
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "head_dim": 256, "vocab_size": 8192}
    shape = CONFIG | sizes | {"num_key_value_heads": 4, "num_hidden_layers": 12}
    tensors = llama_tensors(shape, ml_dtypes.bfloat16)
    write_directory(tmp_path / "large", shape, tensors)
    shape = CONFIG | {"vocab_size": 272, "num_key_value_heads": 4}
    write_directory(tmp_path / "small", shape, llama_tensors(shape))
    for name in ("large", "small"):
        if form == "orbax":
            checkpoints.convert(tmp_path / name, tmp_path / form / name)
        upload(store, tmp_path / (form if form == "orbax" else "") / name)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-c", PROCESS, "s3://models/team"]
    started = [
        subprocess.Popen([*command, str(each), port], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for each in range(4)
    ]
    found = [
        json.loads(process.communicate(timeout=300)[0].splitlines()[-1]) for process in started
    ]
    for each in found:
        assert each["part"] < each["peak"] < 1.5 * each["part"]


class Memory:
    """A file as `StoredFile` shows it."""

    url = "s3://models/x.safetensors"

    def __init__(self, data: bytes):
        self.data, self.size = data, len(data)

    def read(self, start: int, stop: int) -> bytes:
        assert 0 <= start < stop <= self.size
        return self.data[start:stop]


PARTS = st.integers(0, 9)


@settings(max_examples=100)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]),
    st.lists(st.tuples(PARTS, PARTS), max_size=3),
    st.sampled_from([1, 40, 1 << 20]),
)
def test_every_part_is_numpys(shape, dtype, ends, block):
    part = tuple(slice(min(each), max(each) + 1) for each in ends[: len(shape)])
    part = tuple(
        each if each.start < n else slice(None) for each, n in zip(part, shape, strict=False)
    )
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    file = Memory(save({"a": array[:0], "x": array, "z": array[..., :0]}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket, "BLOCK", block)
        patch.setattr(safetensors_ranges, "_MAX_SMALL_BYTES", 8)
        found = RangedFile(file)
        assert found.shapes["x"] == tuple(shape)
        np.testing.assert_array_equal(found.read("x", part), array[part])
        assert found.read("x", part).dtype == dtype
        assert found.read("z").shape == (*shape[:-1], 0)


def of_header(header: object, data: bytes = b"12345678") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)) -> dict:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        (1 << 62).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{x",
        of_header({"x": 3}),
        of_header(entry(shape=(3,))),
        of_header(entry(shape=(-2,))),
        of_header(entry(shape=("2",))),
        of_header(entry(shape=(2, 10**12))),
        of_header(entry(shape=[1] * 70 + [2])),
        of_header(entry(offsets=(8, 0))),
        of_header(entry(offsets=(4, 12))),
        of_header(entry(offsets=(0, 8, 9))),
        of_header(entry(shape=2)),
        of_header(entry(dtype=["F32"])),
        b"\0" * 7 + b"\1" + b"[" * 200_000,
    ],
)
def test_a_damaged_header_is_refused(data):
    with pytest.raises(CheckpointError, match=r"x\.safetensors is truncated or damaged"):
        RangedFile(Memory(data))


def test_an_unknown_number_format_is_refused(store, folder):
    (folder / "model.safetensors.index.json").unlink()
    tensors = llama_tensors(CONFIG) | {"model.norm.weight": np.zeros(16, np.int32)}
    (folder / "model.safetensors").write_bytes(save(tensors))
    upload(store, folder)
    assert "'model.norm.weight' is stored as I32; supported: F64" in error_of(URL)


def test_nothing_there(store):
    store.objects["models/x"] = b""
    message = error_of(URL)
    assert "s3://models/team/tiny has neither config.json nor spec_jax.json among its 0" in message
    assert "NoSuchBucket" in error_of("s3://other/tiny")
    assert "s3://models/a.gguf does not exist" in error_of("s3://models/a.gguf")
    assert "write gs://BUCKET/FOLDER" in error_of("gs://models")


def test_a_shard_that_the_index_lists_is_missing(uploaded):
    del uploaded.objects["models/team/tiny/model-00002-of-00002.safetensors"]
    assert "model-00002-of-00002.safetensors is missing" in error_of(URL)


def test_an_overloaded_store_is_asked_again(uploaded, folder):
    uploaded.failures = 2
    jax.tree.map(np.testing.assert_array_equal, weights(URL), weights(folder))


def test_a_file_that_is_replaced_while_it_is_read(uploaded, folder, monkeypatch):
    opened = RangedFile.small.func

    def replaced(self):
        uploaded.objects["models/team/tiny/model-00001-of-00002.safetensors"] = b"another"
        return opened(self)

    monkeypatch.setattr(RangedFile, "small", property(replaced))
    assert "was changed while it was read; start again" in error_of(URL)


def test_a_format_that_needs_a_disk(uploaded):
    uploaded.objects["models/team/tiny/model.bin"] = b"{}"
    assert "is a model in CTranslate2's format" in error_of(URL)


def test_a_huge_small_file_is_refused(uploaded, monkeypatch):
    monkeypatch.setattr(bucket, "_MAX_SMALL_BYTES", 100)
    assert "expected at most 100" in error_of(URL)


def test_a_list_that_comes_with_a_checkpoint_means_nothing(uploaded, tmp_path):
    other = write_directory(tmp_path / "other")
    (other / "model.safetensors").unlink()
    write_json(other / bucket._LIST, {"url": URL, "files": {"model.safetensors": [1, "x"]}})
    assert "neither model.safetensors nor" in error_of(other)
    uploaded.objects[f"models/team/tiny/{bucket._LIST}"] = b"[]"
    weights(URL)


def test_other_libraries_read_no_bucket(uploaded):
    with pytest.raises(BenchmarkError, match="team/tiny is in an object store, where other"):
        list(prepare_baselines(["transformers"], Mock(), URL, [], print))


def test_a_store_that_does_not_answer(store, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    message = error_of(URL)
    assert "s3://models/team/tiny cannot be read" in message
    assert "credentials" in message


def test_what_is_a_bucket():
    assert is_url("gs://a/b")
    assert not is_url("models/s3://x")
