"""Weights that lie on several devices: read in parts, saved and restored across meshes."""

import math

import jax
import ml_dtypes
import numpy as np
import pytest

from spec_jax import checkpoints
from spec_jax.checkpoints.gguf_file import GgufFile
from spec_jax.checkpoints.safetensors_files import SafetensorsFiles
from spec_jax.checkpoints.shape import read_shape
from spec_jax.errors import CheckpointError
from spec_jax.models.model import Model
from spec_jax.sharding import Layout
from tests.checkpoints.tiny import CONFIG, llama_tensors, write_directory, write_gguf

SHAPE = CONFIG | {"vocab_size": 272}  # 8 divides it, as it does the MLP's 24


def on(num_shards: int):
    layout = Layout.tensor_parallel(num_shards)
    return lambda config: layout.place("target", config.axis_sizes)


def arrays(model: Model) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(model.params)]


def same(one: Model, other: Model) -> bool:
    pairs = zip(arrays(one), arrays(other), strict=True)
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in pairs)


@pytest.fixture(params=["directory", "gguf"])
def source(request, tmp_path):
    tensors = llama_tensors(SHAPE)
    if request.param == "directory":
        return write_directory(tmp_path / "tiny", SHAPE, tensors)
    return write_gguf(tmp_path / "tiny.gguf", SHAPE, tensors)


@pytest.mark.parametrize("num_shards", [2, 8])
def test_a_sharded_model_holds_the_same_weights(source, num_shards):
    whole = checkpoints.load(source).model
    parts = checkpoints.load(source, place=on(num_shards)).model
    assert same(whole, parts)
    gate = parts.params["blocks"][0]["mlp"]["gate"]["weight"].get_value()
    assert gate.addressable_shards[0].data.shape == (16, 24 // num_shards)


SHARDED = ("gate", "up", "down", "embed", "embd")
"""Parts of the names, in both kinds of files, of tensors that eight devices divide."""


def test_no_more_of_a_tensor_is_read_than_a_device_holds(source, monkeypatch):
    kind = SafetensorsFiles if source.is_dir() else GgufFile
    read, shares = kind.read, {}

    def counted(self, name, part=()):
        found = read(self, name, part)
        shares.setdefault(name, set()).add(math.prod(self.shapes[name]) / found.size)
        return found

    monkeypatch.setattr(kind, "read", counted)
    checkpoints.load(source, place=on(8))
    sharded = [share for name, share in shares.items() if any(part in name for part in SHARDED)]
    assert sharded == [{8}] * 7  # three of each of two layers, and the table


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_orbax_moves_a_model_from_mesh_to_mesh(source, dtype, tmp_path):
    before = checkpoints.load(source, dtype=dtype, place=on(8))
    checkpoints.convert(source, tmp_path / "eight", dtype=dtype, place=on(8))
    four = checkpoints.load(tmp_path / "eight", dtype=dtype, place=on(4))
    checkpoints.convert(tmp_path / "eight", tmp_path / "four", dtype=dtype, place=on(4))
    one = checkpoints.load(tmp_path / "four", dtype=dtype)
    assert same(before.model, four.model) and same(before.model, one.model)
    assert one.model.config == before.model.config == read_shape(tmp_path / "four").config
    assert {leaf.dtype.name for leaf in arrays(one.model)} == {dtype}
    text = "the thin man's inn <|im_end|>"
    assert one.tokenizer.encode(text) == before.tokenizer.encode(text)
    assert one.eos_token_ids == before.eos_token_ids
    messages = [{"role": "user", "content": "hi"}]
    expected = before.tokenizer.apply_chat_template(messages)
    assert one.tokenizer.apply_chat_template(messages) == expected


def test_orbax_converts_the_dtype(source, tmp_path):
    before = checkpoints.load(source)
    checkpoints.convert(source, tmp_path / "saved")
    after = checkpoints.load(tmp_path / "saved", dtype="bfloat16", place=on(2)).model
    for one, other in zip(arrays(before.model), arrays(after), strict=True):
        assert np.array_equal(one.astype(ml_dtypes.bfloat16), other)


def test_nothing_is_overwritten(source, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="there exists; choose a new directory"):
        checkpoints.convert(source, tmp_path / "there")
    assert [file.name for file in (tmp_path / "there").iterdir()] == ["notes.txt"]


def test_damaged_directories_are_refused(source, tmp_path):
    checkpoints.convert(source, tmp_path / "saved")
    (tmp_path / "saved" / "checksums.sha256").unlink()
    manifest = tmp_path / "saved" / "spec_jax.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"version": 4', '"version": 5'))
    with pytest.raises(CheckpointError, match="of version 5; this spec-jax reads 4"):
        checkpoints.load(tmp_path / "saved")
    manifest.write_text(text.replace('"embed_size": 16', '"embed_size": 24'))
    with pytest.raises(
        CheckpointError, match=r"its arrays differ from spec_jax.json.*convert the model again"
    ):
        checkpoints.load(tmp_path / "saved")
    manifest.write_text(text.replace('"mlp_size"', '"mlp"'))
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoints.load(tmp_path / "saved")


def test_random_weights_do_not_depend_on_the_mesh(source):
    config = checkpoints.load(source).model.config
    placement = on(8)(config)
    spread = Model.random(config, seed=3, placement=placement)
    plain = Model.random(config, seed=3)
    for one, other in zip(arrays(plain), arrays(spread), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
    gate = spread.params["blocks"][0]["mlp"]["gate"]["weight"].get_value()
    assert gate.addressable_shards[0].data.shape == (16, 3)
