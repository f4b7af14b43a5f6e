"""Directories that `spec-jax convert` wrote, in buckets of an object store."""

import json
import sys

import jax
import numpy as np
import pytest

from spec_jax import CheckpointError, ConfigError, checkpoints
from spec_jax.checkpoints import orbax_directory
from spec_jax.checkpoints.files import fingerprint
from spec_jax.checkpoints.orbax_arrays import OrbaxArrays
from spec_jax.checkpoints.packing import Packing
from spec_jax.checkpoints.shape import read_shape
from spec_jax.models.model import Model
from spec_jax.sharding import Layout
from tests.checkpoints.tiny import CONFIG, llama_tensors, write_directory
from tests.object_store import upload

URL = "s3://models/team/orbax"
SHAPE = CONFIG | {"vocab_size": 272}
EMBEDDING = 272 * 16 * 4  # bytes


def place(config):
    return Layout.tensor_parallel(8).place("target", config.axis_sizes)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "tiny"
    return write_directory(path, SHAPE, llama_tensors(SHAPE))


@pytest.fixture(scope="module", params=["none", "int8", "int4"])
def folder(request, source):
    """What one device wrote, plain or quantized."""
    path = source.parent / request.param / "orbax"
    path.parent.mkdir()
    checkpoints.convert(source, path, quantization=request.param)
    return path


@pytest.fixture(scope="module")
def chunks(source):
    """What one device wrote, the largest matrices in eight chunks."""
    path = source.parent / "chunks" / "orbax"
    path.parent.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orbax_directory, "_CHUNK", EMBEDDING // 8)
        checkpoints.convert(source, path)
    return path


@pytest.fixture(scope="module")
def shards(source):
    """What eight devices wrote, each its part."""
    path = source.parent / "shards" / "orbax"
    path.parent.mkdir()
    checkpoints.convert(source, path, place=place)
    return path


def assert_same(url, folder, **options):
    options = {"packing": Packing("auto")} | options
    there, here = (checkpoints.load(each, **options).model.weights for each in (url, folder))
    assert there.keys() == here.keys()
    for found, expected in zip(jax.tree.leaves(there), jax.tree.leaves(here), strict=True):
        assert (found.dtype, found.sharding) == (expected.dtype, expected.sharding)
        np.testing.assert_array_equal(found, expected)


def error_of(url=URL) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load(url)
    return str(caught.value)


def wanted(place):
    config = read_shape(URL).config
    return Model.abstract(config, dtype="float32", placement=place(config)).weights


def arrays_of(url) -> OrbaxArrays:
    return OrbaxArrays(checkpoints.locate(url, print)[1])


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_model_in_a_bucket_is_the_one_on_the_disk(store, folder, scheme):
    upload(store, folder)
    url = f"{scheme}://models/team/orbax"
    there, here = checkpoints.load(url), checkpoints.load(folder)
    assert (there.name, there.eos_token_ids) == (here.name, here.eos_token_ids)
    assert there.tokenizer.encode("in the") == here.tokenizer.encode("in the")
    for options in ({"place": place}, {"dtype": "bfloat16"}, {"packing": Packing()}):
        assert_same(url, folder, **options)


@pytest.mark.parametrize("written", ["chunks", "shards"])
def test_weights_that_were_written_in_parts(store, written, request):
    folder = request.getfixturevalue(written)
    upload(store, folder)
    for options in ({}, {"place": place}):
        assert_same(URL, folder, **options)


def test_weights_stay_in_the_bucket_and_small_files_are_copied_once(store, chunks):
    upload(store, chunks)
    checkpoints.load(URL)
    _, copy = checkpoints.locate(URL, print)
    assert {each.name for each in copy.iterdir()} >= {"spec_jax.json", "tokenizer.json"}
    assert not (copy / "weights").exists()
    store.reads.clear()
    checkpoints.load(URL)
    assert "tokenizer.json" not in {name for name, _ in store.reads}


@pytest.mark.parametrize("written", ["chunks", "shards"])
def test_a_part_is_read_without_the_others(store, written, request):
    upload(store, request.getfixturevalue(written))
    arrays = arrays_of(URL)
    assert arrays.stored["embed.weight"].shape == (16, 272)
    store.reads.clear()
    part = (slice(None), slice(34, 68))
    found = arrays._arrays["embed.weight"][part].read().result()
    ((_, size),) = store.reads
    assert size < 1.1 * EMBEDDING / 8
    np.testing.assert_array_equal(found, llama_tensors(SHAPE)["model.embed_tokens.weight"].T[part])
    # Devices that hold the same part share its reading, and eight parts are the whole.
    store.reads.clear()
    arrays.load({"embed.weight": wanted(place)["embed.weight"]})
    assert len(store.reads) == 8


def test_a_converted_model_is_converted_from_a_bucket(store, folder, tmp_path):
    upload(store, folder)
    for number, each in enumerate((URL, folder)):
        checkpoints.convert(each, tmp_path / str(number), format="safetensors")
    files = [tmp_path / str(number) / "model.safetensors" for number in range(2)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_only_its_manifest_is_read_for_a_shape(store, chunks):
    upload(store, chunks)
    assert read_shape(URL).config == read_shape(chunks).config
    assert [name for name, _ in store.reads] == ["spec_jax.json"]


def test_another_kind_of_model_in_its_place(store, chunks, tmp_path):
    upload(store, chunks)
    assert read_shape(URL).config.vocab_size == 272
    store.objects.clear()
    upload(store, write_directory(tmp_path / "orbax", CONFIG | {"vocab_size": 300}))
    assert read_shape(URL).config.vocab_size == 300


def the_data_file(store) -> str:
    """The name of the largest file."""
    return max(store.objects, key=lambda name: len(store.objects[name]))


@pytest.mark.parametrize("name", ["tokenizer.json", "weights/state/manifest.ocdbt"])
def test_a_file_that_reading_begins_with_is_missing(store, chunks, name):
    upload(store, chunks)
    for each in [each for each in store.objects if each.endswith(name.rpartition("/")[2])]:
        del store.objects[each]
    assert f"{URL} lacks {name.replace('state', '**')}; upload the whole directory" in error_of()


def test_a_file_of_weights_is_missing(store, chunks):
    upload(store, chunks)
    name = the_data_file(store)
    del store.objects[name]
    assert "lacks a file" in (message := error_of()) and "Upload the directory again" in message


def test_a_file_that_is_replaced_while_it_is_read(store, chunks, monkeypatch):
    upload(store, chunks)
    name = the_data_file(store)
    load = OrbaxArrays.load

    def replaced(self, wanted):
        store.objects[name] = b"another"
        return load(self, wanted)

    monkeypatch.setattr(OrbaxArrays, "load", replaced)
    message = error_of()
    assert f"{URL}/weights" in message and "was changed while it was read" in message


def test_no_permission_and_no_answer(store, chunks, monkeypatch):
    upload(store, chunks)
    name = the_data_file(store)
    store.refused.add(name)
    message = error_of()
    assert f"{URL}/weights/state cannot be read" in message and "credentials" in message
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert f"{URL} cannot be read" in error_of()


@pytest.mark.parametrize("end", ["manifest.ocdbt", "data"])
@pytest.mark.parametrize(
    "change", [bytes.swapcase, lambda data: data[: len(data) // 2], lambda data: b""]
)
def test_a_damaged_file(store, chunks, end, change):
    upload(store, chunks)
    for name in [the_data_file(store)] if end == "data" else list(store.objects):
        if end == "data" or name.endswith(end):
            store.objects[name] = change(store.objects[name])
    message = error_of()
    assert URL in message and ("is damaged" in message or "ends after" in message)


def test_arrays_of_another_model(store, chunks):
    upload(store, chunks)
    name = "models/team/orbax/spec_jax.json"
    manifest = json.loads(store.objects[name])
    manifest["config"]["embed_size"] = 32
    store.objects[name] = json.dumps(manifest).encode()
    assert "its arrays differ from spec_jax.json" in error_of()


def test_the_list_identifies_all_files(store, chunks):
    upload(store, chunks)
    before = fingerprint(checkpoints.locate(URL, print)[1])
    store.objects[the_data_file(store)] += b" "
    assert fingerprint(checkpoints.locate(URL, print)[1]) != before


def test_the_extra_is_missing(store, chunks, monkeypatch):
    upload(store, chunks)
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(ConfigError, match=r"needs the package 'tensorstore'.*spec-jax\[orbax\]"):
        checkpoints.load(URL)
