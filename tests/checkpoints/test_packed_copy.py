"""Copies of packed weights: they are the weights, they are mapped, and damage is noticed."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from spec_jax import checkpoints
from spec_jax.checkpoints import packed_copy
from spec_jax.checkpoints.gguf_blocks import unpack
from spec_jax.checkpoints.packed_copy import PackedCopy
from spec_jax.checkpoints.packing import Packing
from spec_jax.kernels import PackedWeight, Quantized, quantize
from spec_jax.models.model import Model
from tests.checkpoints.test_gguf_blocks import KINDS, blocks
from tests.checkpoints.tiny import CONFIG, llama_tensors, write_directory, write_gguf

GGUF = Packing("gguf", native=True, activations="int8")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where copies lie; small models are copied too."""
    monkeypatch.setattr(packed_copy, "cache_directory", lambda: tmp_path / "cache")
    monkeypatch.setattr(packed_copy, "MIN_BYTES", 0)
    monkeypatch.setattr(packed_copy.os, "fsync", lambda file: None)  # the disk takes its time
    return tmp_path / "cache" / "packed"


@pytest.fixture
def packings(monkeypatch):
    """Counts the weights that are packed."""
    made, pack = [], Packing.pack
    monkeypatch.setattr(
        Packing, "pack", lambda self, rows, leaf: made.append(leaf) or pack(self, rows, leaf)
    )
    return made


def quantized_file(folder):
    config = CONFIG | {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
    kind = GGMLQuantizationType.Q4_0
    return write_gguf(folder / "model.gguf", config, llama_tensors(config), quantization=kind)


def same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for ours, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
    return True


def weights_of_all_kinds():
    matrix = np.random.default_rng(0).standard_normal((40, 96)).astype(np.float32)
    stack = Quantized.stack([quantize(each, 4) for each in (matrix, -matrix)])
    weights = {f"float {bits}": PackedWeight.of(quantize(matrix, bits)) for bits in (4, 8)}
    weights |= {f"whole {bits}": PackedWeight.of(quantize(matrix, bits), "int8") for bits in (4, 8)}
    for name in KINDS:
        kind = GGMLQuantizationType[name]
        weights[name] = PackedWeight.of(unpack(blocks(kind, rows=20), kind), "int8")
    norm = jnp.asarray(matrix[0, :7])  # 28 bytes, so that what follows needs a gap
    return weights | {
        "stack": PackedWeight.of(stack, "int8"),
        "router": PackedWeight.of(matrix),
        "norm": norm,
        "table": jnp.asarray(matrix, jnp.bfloat16),
        "scalar": jnp.float32(3.0),
    }


def test_every_kind_of_weight_is_read_as_it_was_written(folder):
    weights, copy = weights_of_all_kinds(), PackedCopy("key")
    assert copy.read() is None
    copy.write(weights)
    again = copy.read()
    assert again is not None and list(again) == list(weights) and same(again, weights)
    assert sorted(each.suffix for each in folder.iterdir()) == [".json", ".weights"]


def test_weights_are_mapped_and_not_copied(folder):
    weight = PackedWeight.of(quantize(np.ones((64, 64), np.float32), 4), "int8")
    PackedCopy("key").write({"matrix": weight})
    mapped = PackedCopy("key").read()["matrix"]
    with open("/proc/self/maps") as maps:
        files = [line.split()[0].split("-") for line in maps if "key.weights" in line]
    places = [(int(begin, 16), int(end, 16)) for begin, end in files]
    for leaf in jax.tree.leaves(mapped):
        at = leaf.unsafe_buffer_pointer()
        assert any(begin <= at < end for begin, end in places)


@pytest.mark.parametrize("kind", ["gguf", "int4", "int8"])
def test_a_later_load_packs_nothing(tmp_path, packings, folder, kind):
    if kind == "gguf":
        source, packing = quantized_file(tmp_path), GGUF
    else:
        source = write_directory(tmp_path / "model")
        packing = Packing(kind, native=True, activations="int8")
    first = checkpoints.load(source, packing=packing)
    assert packings
    del packings[:]
    second = checkpoints.load(source, packing=packing)
    assert not packings and same(first.model, second.model)
    # Another form, a file that was touched, or other code is another copy.
    checkpoints.load(source, packing=Packing(packing.quantization, True, "float32"))
    assert packings and len(list(folder.glob("*.weights"))) == 2
    del packings[:]
    touched = source if source.is_file() else source / "model.safetensors"
    os.utime(touched, ns=(0, 12345))
    checkpoints.load(source, packing=packing)
    assert packings and len(list(folder.glob("*.weights"))) == 3


def test_other_code_makes_another_copy(tmp_path, packings, folder, monkeypatch):
    source = quantized_file(tmp_path)
    checkpoints.load(source, packing=GGUF)
    monkeypatch.setattr(packed_copy, "_code", lambda: "another version")
    del packings[:]
    checkpoints.load(source, packing=GGUF)
    assert packings and len(list(folder.glob("*.weights"))) == 2


def test_what_native_code_does_not_multiply_or_round_is_not_copied(tmp_path, folder):
    source = write_directory(tmp_path / "model")
    for packing in (Packing(), Packing("int8"), Packing("none", native=True)):
        checkpoints.load(source, packing=packing)
    assert not folder.exists()


def damages(data, manifest, random):
    """Ways to damage the two files: a bit, a part, the end, all."""
    file = random.choice([data, manifest])
    content = bytearray(file.read_bytes())
    way = random.integers(5)
    if way == 0:
        content[random.integers(len(content))] ^= 1 << int(random.integers(8))
    elif way == 1:
        del content[random.integers(len(content)) :]
    elif way == 2:
        content += b"\0" * int(random.integers(1, 100))
    elif way == 3:
        begin = int(random.integers(len(content)))
        content[begin : begin + 64] = bytes(len(content[begin : begin + 64]))
    else:
        content = bytearray(random.bytes(int(random.integers(300))))
    before = file.read_bytes()
    file.write_bytes(content)
    return content != before


def test_a_damaged_copy_is_said_once_and_made_again(folder):
    matrix = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)
    weights = {"matrix": PackedWeight.of(quantize(matrix, 4), "int8"), "norm": jnp.ones(3)}
    copy, random = PackedCopy("key"), np.random.default_rng(1)
    files = [folder / f"key{ending}" for ending in (".weights", ".json")]
    for _ in range(300):
        copy.write(weights)
        is_damaged = damages(*files, random)
        if not is_damaged:
            assert same(copy.read(), weights)
            continue
        with pytest.warns(RuntimeWarning, match="was damaged, and is made again") as said:
            assert copy.read() is None
        assert len(said) == 1
        assert not any(file.exists() for file in files)
        assert copy.read() is None  # a warning would be an error
        copy.write(weights)
        assert same(copy.read(), weights)


def test_a_copy_that_may_not_be_read_is_left_alone(folder, monkeypatch, recwarn):
    copy = PackedCopy("key")
    copy.write({"table": jnp.zeros((10,), jnp.float32)})

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as other_user:
        other_user.setattr(packed_copy.Path, "read_bytes", refuse)
        assert copy.read() is None
    assert not recwarn.list and copy.read() is not None


def test_a_copy_that_was_only_touched_is_compared_once(folder, monkeypatch):
    weights, copy, compared = weights_of_all_kinds(), PackedCopy("key"), []
    copy.write(weights)
    sum_of = packed_copy.sum_of
    monkeypatch.setattr(packed_copy, "sum_of", lambda file: compared.append(file) or sum_of(file))
    os.utime(folder / "key.weights", ns=(0, 12345))
    for _ in range(3):
        assert same(copy.read(), weights)
    assert len(compared) == 1


def test_the_copies_used_last_stay(folder, monkeypatch):
    weights = {"table": jnp.zeros((1000,), jnp.float32)}
    for key in ("a", "b", "c"):
        PackedCopy(key).write(weights)
    # Files of interrupted processes go first.
    (folder / "interrupted.partial").write_bytes(bytes(5000))
    for at, key in enumerate(("b", "c", "a")):
        for file in folder.glob(f"{key}.*"):
            os.utime(file, ns=(at, file.stat().st_mtime_ns))
    assert PackedCopy("b").read() is not None  # now used last
    monkeypatch.setattr(packed_copy, "MAX_BYTES", 13_000)
    PackedCopy("d").write(weights)
    assert {each.stem for each in folder.glob("*.weights")} == {"a", "b", "d"}
    assert not list(folder.glob("*.partial"))


def test_without_room_nothing_is_kept(folder, monkeypatch):
    weights = {"table": jnp.zeros((1000,), jnp.float32)}
    usage = packed_copy.shutil.disk_usage(folder.parent.parent)._replace(free=7000)
    monkeypatch.setattr(packed_copy.shutil, "disk_usage", lambda path: usage)
    PackedCopy("a").write(weights)
    assert not list(folder.glob("*"))
    monkeypatch.undo()
    monkeypatch.setattr(packed_copy, "MIN_BYTES", 0)
    monkeypatch.setattr(packed_copy, "cache_directory", lambda: folder.parent)

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed_copy.os, "fsync", full)
    PackedCopy("a").write(weights)
    assert not list(folder.glob("*"))


def test_logits_are_the_same(tmp_path):
    source = quantized_file(tmp_path)
    tokens = jnp.arange(6, dtype=jnp.int32)[None]

    def logits():
        model: Model = checkpoints.load(source, packing=GGUF).model
        return jax.jit(lambda model: model.score(tokens, model.new_cache(1, 32)).logits)(model)

    assert np.array_equal(logits(), logits())
