"""Files of JSON lines that grow."""

import json

import pytest

from spec_jax.text import json_lines
from spec_jax.text.json_lines import append_line, drop_unfinished_line

BEGIN = b'{"index": '


@pytest.mark.parametrize("block", [1, 7, 1 << 16])
def test_a_line_that_was_cut_off_is_dropped_wherever_it_ends(tmp_path, monkeypatch, block):
    monkeypatch.setattr(json_lines, "_BLOCK", block)
    file = tmp_path / "lines.jsonl"
    values = [{"index": i, "text": text} for i, text in enumerate(["ü\n\u2028", "", "x" * 50])]
    for value in values:
        append_line(file, value)
    whole = file.read_bytes()
    assert [json.loads(line) for line in whole.decode().split("\n")[:-1]] == values
    for size in range(len(whole) + 1):
        file.write_bytes(whole[:size])
        drop_unfinished_line(file, BEGIN)
        assert file.read_bytes() == whole[: whole.rfind(b"\n", 0, size) + 1]


@pytest.mark.parametrize("content", [b"", b"mine", b"mine\nmine", b'{"a": 1}\n{"index": 1'])
def test_a_file_of_something_else_is_left_as_it_is(tmp_path, content):
    file = tmp_path / "lines.jsonl"
    file.write_bytes(content)
    drop_unfinished_line(file, BEGIN)
    assert file.read_bytes() == content
