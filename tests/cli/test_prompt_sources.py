"""Prompts come from arguments, files and standard input."""

import pytest

from tests.cli.harness import Scripted, Stdin, failure, finished, run


def prompts_of(llm: type[Scripted]) -> list:
    return [list(each) for each in llm.prompts][-1]


def test_prompts_come_from_everywhere_in_order(capsys, scripted, monkeypatch, tmp_path):
    (tmp_path / "letter.txt").write_bytes("Grüße,\nline two\r\n".encode("utf-8-sig"))
    lines = ['{"prompt": "one\u2028line", "id": 1}', "", '{"prompt": "two"}']
    (tmp_path / "many.jsonl").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", Stdin("from a pipe\n"))
    llm = scripted(*finished(6))
    files = [tmp_path / "letter.txt", tmp_path / "many.jsonl", "-"]
    flags = ["--prompt", "flag"] + [each for file in files for each in ("--prompt-file", file)]
    assert run(capsys, "generate", *flags, "--target", "t", "positional")[0] == 0
    expected = ["positional", "flag", "Grüße,\nline two", "one\u2028line", "two", "from a pipe"]
    assert prompts_of(llm) == expected


def test_standard_input_is_the_prompt_if_there_is_no_other(capsys, scripted, monkeypatch):
    monkeypatch.setattr("sys.stdin", Stdin("  two\nlines\n\n"))
    llm = scripted(*finished(1))
    assert run(capsys, "generate", "--target", "t")[0] == 0
    assert prompts_of(llm) == ["  two\nlines\n"]
    monkeypatch.setattr("sys.stdin", Stdin("", terminal=True))
    assert "no prompt given" in failure(capsys, "generate", "--target", "t")
    monkeypatch.setattr("sys.stdin", Stdin(""))
    assert "standard input is empty" in failure(capsys, "generate", "--target", "t")


@pytest.mark.parametrize(
    "content, expected",
    [
        (b'{"prompt": "a"}\n{"prompt": ', "line 2 is not JSON"),
        (b'["a"]', "line 1 is ['a']"),
        (b'{"promt": "a"}', 'no key "prompt". Found: promt.'),
        (b'{"prompt": 5}', "the prompt 5"),
        (b'{"prompt": ""}', "line 1 is empty"),
        (b'{"prompt": "\\ud800"}', "not valid text: '\\ud800'"),
        (b"\n", "holds no prompts"),
        (b"ab\xffc", "not UTF-8 text (byte 2 is 0xff)"),
    ],
)
def test_bad_prompt_files(capsys, tmp_path, content, expected):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    message = failure(capsys, "generate", "--target", "t", "--prompt-file", path)
    assert expected in message and str(path) in message


def test_a_file_without_an_end_is_refused(capsys, tmp_path):
    message = failure(capsys, "generate", "--target", "x", "--prompt-file", "/dev/zero")
    assert "/dev/zero holds more than 128 MiB" in message
    message = failure(capsys, "generate", "a", "--target", "x", "--layout", "/dev/zero")
    assert "/dev/zero is not a file but a directory, a pipe or a device" in message
    out = ("--out", tmp_path / "run")
    message = failure(capsys, "train-draft", "--target", "x", *out, "--data", "/dev/zero")
    assert "/dev/zero is not a file" in message
