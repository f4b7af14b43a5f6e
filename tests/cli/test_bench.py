"""`spec-jax bench` and `spec-jax report`."""

import json
import shlex

import pytest

from spec_jax.benchmarking import results
from spec_jax.cli.commands import parse
from tests.benchmarking.handmade import results as handmade
from tests.cli.harness import failure, run

PROMPTS = (
    {"prompt": "the in the in the", "category": "a"},
    {"prompt": "in the in", "category": "b"},
    {"prompt": "the a the in the a", "category": "a"},
)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "own.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in PROMPTS))
    return path


def bench(capsys, model, prompts, out, *more):
    flags = "--methods suffix --num-speculative-tokens 2 --temperature 0.8 --max-tokens 6"
    command = ("--target", model, *shlex.split(flags), "--repeats", 2, "--prompt-set", prompts)
    return run(capsys, "bench", *command, "--out", out, *more)


def interrupted_after(monkeypatch, lines: int):
    """Ctrl-C comes when this number of lines has been written."""
    left, add = [lines], results.Writer.add

    def interrupting(writer, line):
        add(writer, line)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    monkeypatch.setattr(results.Writer, "add", interrupting)


def without_times(run):
    """All of a run that does not change from measurement to measurement."""
    times = {"first_token_seconds", "seconds", "decode_seconds"}
    return run.model_dump(exclude={"seconds": True, "requests": {"__all__": times}})


def test_interrupted_and_resumed_equals_uninterrupted(
    capsys, model, prompts, tmp_path, monkeypatch
):
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    code, out, err = bench(capsys, model, prompts, whole)
    assert code == 0, err
    words = " ".join(out.split())
    assert "own, T = 0.8 system tokens/s speed-up" in words
    assert "suffix, K = 2" in words and "4 runs in" in " ".join(err.split())

    with monkeypatch.context() as patched:
        interrupted_after(patched, 3)  # the costs and two runs
        code, out, err = bench(capsys, model, prompts, parts)
    assert code == 130 and "--resume continues" in " ".join(err.split())
    assert "suffix, K = 2" in out  # what was measured is shown
    assert len(results.read(parts).runs) == 2
    code, out, err = bench(capsys, model, prompts, parts, "--resume")
    assert code == 0, err

    one, other = results.read(whole), results.read(parts)
    assert one.header.differences(other.header) == []
    assert [without_times(each) for each in one.runs] == [
        without_times(each) for each in other.runs
    ]
    assert list(one.costs) == list(other.costs) == [1]
    assert [(s.name, s.width) for s in one.costs[1].steps] == [
        ("target", 1), ("target", 3),
    ]  # fmt: skip
    first, second = one.runs[0], one.runs[2]
    assert [each.category for each in first.requests] == ["a", "b", "a"]
    assert first.system == second.system == "plain"
    assert [e.digest for e in first.requests] != [e.digest for e in second.requests]  # other seeds

    code, _, err = bench(capsys, model, prompts, parts, "--resume", "--seed", "1")
    assert code == 2 and "seed is 0 there and 1 here" in err


def test_a_report(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path, html = tmp_path / "r.jsonl", tmp_path / "report.html"
    own = handmade()
    writer = results.Writer(path, own.header)
    for line in own.runs:
        writer.add(line)
    code, out, err = run(capsys, "report", path, "--out", html)
    assert (code, out) == (0, "") and "report.html" in err
    assert html.read_text().startswith("<!doctype html>")
    code, _, err = run(capsys, "report", path, "--out", html, "--png", tmp_path / "figures")
    assert code == 0 and f"{len(list((tmp_path / 'figures').glob('*.png')))} figures in" in err
    path.write_text(path.read_text() + "{")
    html.unlink()
    assert "line 26 is damaged" in failure(capsys, "report", path, "--out", html)
    assert not html.exists()


def test_flags_become_options():
    flags = (
        "--target t --draft d --num-speculative-tokens 0-2,4 --temperature 0,1 --top-p 0.9,1 "
        "--batch-size 1,2 --verification token,block --prompt-set chat --out o"
    )
    options = parse("bench", shlex.split(flags))
    assert options.methods == ("draft_model", "prompt_lookup")
    assert options.num_speculative_tokens == (0, 1, 2, 4) and options.verification == (
        "token",
        "block",
    )
    assert (options.temperature, options.top_p) == ((0.0, 1.0), (0.9, 1.0))
    assert options.speculation == {"draft": "d"} and options.prompt_set == ("chat",)
    assert options.command == f"spec-jax bench {flags}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no target given"),
        (("--target", "t"), "--out FILE.jsonl"),
        (("--target", "t", "--out", "o", "--methods", "sufix"), "Did you mean 'suffix'?"),
        (
            ("--target", "t", "--out", "o", "--batch-size", "0"),
            "batch_size.0 is 0; it should be at least 1",
        ),
        (("--target", "t", "--out", "o", "--temperature", "-1"), "temperature is -1.0"),
        (("--target", "t", "--out", "o", "--prompt-set", "chats"), "Did you mean 'chat'?"),
        (("--target", "t", "--out", "o", "--baseline", "vllm"), "baseline is 'vllm'."),
        (("--target", "t", "--out", "o", "--methods", "draft_model"), "needs draft=..."),
        (("--target", "t", "--out", "o", "--num-speculative-tokens", "a"), "'a' is not an integer"),
    ],
)
def test_mistakes(capsys, arguments, said):
    assert said in failure(capsys, "bench", *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no results given"),
        (("r.jsonl",), "--out report.html"),
        (("r.jsonl", "--out", "r.jsonl"), "name another file"),
        (("r.jsonl", "--out", "r.html", "--png", __file__), "is not a directory"),
        (("none.jsonl", "--out", "r.html"), "none.jsonl"),
    ],
)
def test_mistakes_of_reports(capsys, arguments, said):
    assert said in failure(capsys, "report", *arguments)
