"""GGUF headers: what the `gguf` package reads, and no trust in what a file declares."""

import resource
import struct
import time

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_jax.checkpoints.gguf_header import read_header
from tests.checkpoints.tiny import write_gguf

NUMBERS = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=5)
TEXTS = st.lists(st.text(max_size=9), min_size=1, max_size=5)
VALUES = st.one_of(
    st.integers(0, 2**31 - 1), st.floats(width=32, allow_nan=False), st.booleans(), st.text(),
    NUMBERS, TEXTS,
)  # fmt: skip


@given(
    st.dictionaries(st.text("abc.", min_size=1, max_size=8), VALUES, max_size=6),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.sampled_from([gguf.GGUFEndian.LITTLE, gguf.GGUFEndian.BIG]),
)
def test_what_the_package_reads(tmp_path_factory, metadata, shape, endianess):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=endianess)
    for name, value in metadata.items():
        kind = gguf.GGUFValueType.get_type(value)
        sub_type = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
        writer.add_key_value(f"own.{name}", value, kind, sub_type)
    plain = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    writer.add_tensor("plain", plain)
    rows = np.random.default_rng(0).standard_normal((*shape, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("packed", gguf.quantize(rows, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found, tensors = read_header(path)
    theirs = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in theirs.fields.items()}
    assert found == {name: fields[name] for name in fields if not name.startswith("GGUF.")}
    assert len(tensors) == len(theirs.tensors)
    for each in theirs.tensors:
        ours = tensors[each.name]
        assert (ours.kind, ours.offset, ours.dtype.newbyteorder("=")) == (
            each.tensor_type, each.data_offset, each.data.dtype.newbyteorder("="),
        )  # fmt: skip
        assert (ours.shape, ours.stored_shape) == (
            tuple(each.shape.tolist()[::-1]), each.data.shape,
        )  # fmt: skip


def header(*parts, tensors=0, fields=0, version=3):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, fields) + b"".join(parts)


def name(text):
    return struct.pack("<Q", len(text)) + text


HUGE = 2**60
LIES = {
    "tensors": header(tensors=HUGE),
    "fields": header(fields=HUGE),
    "a name": header(struct.pack("<Q", HUGE), fields=1),
    "a text": header(name(b"a"), struct.pack("<IQ", 8, HUGE), fields=1),
    "an array of texts": header(name(b"a"), struct.pack("<IIQ", 9, 8, HUGE), fields=1),
    "an array of numbers": header(name(b"a"), struct.pack("<IIQ", 9, 4, HUGE), fields=1),
    "an array of arrays": header(name(b"a"), struct.pack("<IIQ", 9, 9, 1), fields=1),
    "an unknown type": header(name(b"a"), struct.pack("<I", 13), fields=1),
    "two fields": header(*[name(b"a") + struct.pack("<IB", 0, 1)] * 2, fields=2),
    "no text": header(name(b"\xff\xfe"), struct.pack("<IB", 0, 1), fields=1),
    "dimensions": header(name(b"t"), struct.pack("<I", 2**31), tensors=1),
    "a tensor": header(name(b"t"), struct.pack("<IQIQ", 1, HUGE, 0, 0), tensors=1),
    "a tensor's type": header(name(b"t"), struct.pack("<IQIQ", 1, 1, 99, 0), tensors=1),
    "a tensor's offset": header(name(b"t"), struct.pack("<IQIQ", 1, 1, 0, HUGE), tensors=1),
    "an alignment": header(
        name(b"general.alignment"), struct.pack("<II", 4, 3), tensors=0, fields=1
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_a_file_declares_is_checked_before_memory_is_taken(lie, tmp_path):
    path = tmp_path / "lie.gguf"
    path.write_bytes(LIES[lie] + bytes(60_000))
    with pytest.raises(ValueError):
        read_header(path)


def test_mutants_of_a_header_end_soon_and_take_little_memory(tmp_path):
    whole = bytearray(write_gguf(tmp_path / "tiny.gguf").read_bytes())
    random, path = np.random.default_rng(0), tmp_path / "mutant.gguf"
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    read = 0
    for _ in range(300):
        mutant = bytearray(whole)
        for at in random.integers(0, min(len(whole), 6000), random.integers(1, 4)):
            mutant[at] = random.integers(256)
        path.write_bytes(mutant[: random.integers(len(whole) // 2, 2 * len(whole))])
        try:
            read_header(path)
            read += 1
        except ValueError:
            pass
    assert 0 < read < 300
    assert time.monotonic() - begin < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 * 1024  # KiB
