"""Prompts come from arguments, files and standard input."""

import json

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
        (b'{"promt": "a"}', 'no key "prompt" or "messages". Found: promt.'),
        (b'{"prompt": "a", "messages": []}', 'both "prompt" and "messages"'),
        (b'{"messages": []}', "line 1: messages is []"),
        (b'{"messages": [{"role": "usr", "content": "a"}]}', "'usr' is unknown"),
        (b'{"messages": [{"role": "user", "content": 5}]}', "content is int"),
        (b'{"messages": [{"role": "user", "content": "a"}], "tools": {}}', "has the tools {}"),
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


MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why?"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


@pytest.fixture
def encoded(scripted):
    """What is put through the chat template of a scripted model."""
    calls = []
    llm = scripted(*finished(3))
    llm.encode_chat = staticmethod(
        lambda messages, **options: calls.append((messages, options)) or [len(calls)]
    )
    return llm, calls


def test_lines_may_hold_conversations(capsys, encoded, tmp_path):
    llm, calls = encoded
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    lines = [
        {"messages": MESSAGES},
        {"messages": [{"role": "user", "content": parts}], "tools": TOOLS},
        {"prompt": "plain"},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    flags = ("--target", "t", "--prompt-file", tmp_path / "a.jsonl")
    code, out, _ = run(capsys, "generate", *flags, "--chat-template-kwargs", '{"think": false}')
    assert code == 0 and "==> prompt 0: Why? <==" in out
    assert prompts_of(llm) == [[1], [2], "plain"]
    assert [messages for messages, _ in calls] == [
        MESSAGES,
        [{"role": "user", "content": "one\ntwo"}],
    ]
    assert [options["tools"] for _, options in calls] == [None, TOOLS]
    assert all(options["chat_template_kwargs"] == {"think": False} for _, options in calls)
    _, out, _ = run(capsys, "generate", *flags, "--json")
    first, _, last = map(json.loads, out.splitlines())
    assert first["messages"] == MESSAGES and last["prompt"] == "plain"


def test_tools_are_described_to_every_chat(capsys, encoded, tmp_path):
    _, calls = encoded
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    flags = ("--target", "t", "--prompt", "a", "--tools", tmp_path / "tools.json")
    assert run(capsys, "generate", "--chat", *flags)[0] == 0
    assert [list(options["tools"]) for _, options in calls] == [TOOLS]
    assert "tools is for the chat template; give --chat" in failure(capsys, "generate", *flags)


@pytest.mark.parametrize(
    "flags, expected",
    [
        (("--chat-template-kwargs", "{"), "'{' is not JSON"),
        (("--chat-template-kwargs", "[1]"), "'[1]' is not a JSON object"),
        (("--chat-template-kwargs", "{}"), "chat_template_kwargs is for the chat template"),
        (("--tools", "nowhere"), "cannot read list of functions 'nowhere'"),
        (("--tools", "BAD"), "has the tools {}"),
        (("--tools", "WORSE"), "is not JSON"),
    ],
)
def test_bad_template_options(capsys, tmp_path, flags, expected):
    (tmp_path / "BAD").write_text("{}")
    (tmp_path / "WORSE").write_text("{")
    flags = [tmp_path / each if each in ("BAD", "WORSE") else each for each in flags]
    assert expected in failure(capsys, "generate", "a", "--target", "t", *flags)


def test_a_file_without_an_end_is_refused(capsys, tmp_path):
    message = failure(capsys, "generate", "--target", "x", "--prompt-file", "/dev/zero")
    assert "/dev/zero holds more than 128 MiB" in message
    message = failure(capsys, "generate", "a", "--target", "x", "--layout", "/dev/zero")
    assert "/dev/zero is not a file but a directory, a pipe or a device" in message
    out = ("--out", tmp_path / "run")
    message = failure(capsys, "train-draft", "--target", "x", *out, "--data", "/dev/zero")
    assert "/dev/zero is not a file" in message
