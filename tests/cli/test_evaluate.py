"""`spec-jax evaluate`."""

import json
import shlex

import numpy as np
import pytest

from spec_jax.cli.commands import parse
from spec_jax.config import SpeculativeConfig
from spec_jax.errors import BenchmarkError
from spec_jax.evaluation import tasks
from spec_jax.evaluation.parity import Scale, compare
from spec_jax.evaluation.quality import Arm, Quality
from spec_jax.evaluation.tasks import Answer
from tests.checkpoints.tiny import CONFIG, write_directory
from tests.cli.harness import failure, run

LOOKUP = ("--method", "prompt_lookup", "--num-speculative-tokens", "2")


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "texts.jsonl"
    texts = ("the in the in the", "in the in the in", "an inn in an inn", "a the a the a")
    values = [{"prompt": text, "reference": "the end of it", "chat": False} for text in texts]
    path.write_text("".join(json.dumps(each) + "\n" for each in values))
    return path


def test_flags_become_options(data):
    flags = f"--task summarization --data {data} --target t --draft d --seed 3 --num-problems 9"
    options = parse("evaluate", shlex.split(f"{flags} --temperature 0.8 --samples 4"))
    assert options.speculative == SpeculativeConfig(method="draft_model", draft="d")
    assert (options.task, options.data, options.num_problems) == ("summarization", str(data), 9)
    assert (options.sampling.temperature, options.sampling.n, options.seed) == (0.8, 4, 3)
    assert options.max_tokens is None and options.output is None
    own = parse("evaluate", shlex.split("--task likelihood --target t --draft d"))
    assert own.sampling.temperature == 1.0


def test_greedy_answers_are_the_same(capsys, model, data, tmp_path):
    """On a model that says something, by the likelihood of its answers."""
    out_file = tmp_path / "answers.jsonl"
    command = ("evaluate", "--task", "likelihood", "--data", data, "--target", model, *LOOKUP)
    command += ("--max-tokens", 12, "--dtype", "float32", "--temperature", 0)
    code, out, err = run(capsys, *command, "--json", "--out", out_file)
    found = json.loads(out)
    assert (code, out.count("\n"), err) == (0, 1, "")
    assert (found["verdict"], found["differing_answers"], found["items"]) == ("no difference", 0, 4)
    assert found["difference"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert found["plain"]["mean"] == found["speculative"]["mean"] < 0
    assert found["plain"]["draft_tokens"] == 0 < found["speculative"]["draft_tokens"]
    assert (found["task"], found["method"], found["seed"]) == ("likelihood", "prompt_lookup", 0)
    written = [json.loads(line) for line in out_file.read_text().splitlines()]
    assert [each["arm"] for each in written] == ["plain"] * 4 + ["speculative"] * 4
    assert written[0]["token_ids"] == written[4]["token_ids"]
    scores = [each["score"] for each in written[:4]]
    assert found["plain"]["mean"] == pytest.approx(np.mean(scores))


def test_answers_are_on_the_disk_before_they_are_scored(capsys, model, data, tmp_path, monkeypatch):
    def fail(*args):
        raise BenchmarkError("no scores today")

    monkeypatch.setattr(tasks.Likelihood, "score", fail)
    out_file = tmp_path / "answers.jsonl"
    command = ("evaluate", "--task", "likelihood", "--data", data, "--target", model, *LOOKUP)
    said = failure(capsys, *command, "--max-tokens", 4, "--temperature", 0, "--out", out_file)
    assert "no scores today" in said
    written = [json.loads(line) for line in out_file.read_text().splitlines()]
    assert [each["arm"] for each in written] == ["plain"] * 4 + ["speculative"] * 4
    assert all(each["token_ids"] and each["score"] is None for each in written)


def test_a_model_too_weak_is_not_tested(capsys, model, data):
    command = ("evaluate", "--task", "summarization", "--data", data, "--target", model, *LOOKUP)
    code, out, _ = run(capsys, *command, "--max-tokens", 12)
    assert code == 3
    assert (
        "NOT TESTED: no answer of either scored better than 0. Give a stronger target"
        in " ".join(out.split())
    )


SCORES = np.random.default_rng(0).random((30, 1))
ARM = Arm([[Answer(i, "", (i,), (), 1, 1)] for i in range(30)], [], 2.0)
GAIN = np.where(np.arange(30) % 2, 0.1, -0.1)[:, None]
WORSE = compare(Scale("ROUGE-2 F1"), SCORES, SCORES * 0.8)
FOUND = [
    (
        Quality(WORSE, ARM, ARM, 15),
        "0",
        1,
        (
            "ROUGE-2 F1 95 % interval tokens/s",
            f"difference {WORSE.difference.mean:.4f} {WORSE.difference.low:.4f} to -0.0",
            "15 of 30 answers have other tokens than plain decoding. note greedy tokens differ",
            "DIFFERENT: the interval of the difference is below 0. `spec-jax audit` tests",
        ),
    ),
    (
        Quality(compare(Scale("WER", 1.0, False), SCORES, SCORES + 0.1), ARM, ARM, None),
        "1",
        1,
        ("is above 0. A lossless method is called different in one run of twenty by chance",),
    ),
    (
        Quality(compare(Scale("pass@1"), SCORES, SCORES + GAIN), ARM, ARM, None),
        "1",
        0,
        ("the interval of the difference holds 0. The run could have seen one of 0.0380.",),
    ),
    (
        Quality(compare(Scale("pass@1"), SCORES, SCORES), ARM, ARM, 0),
        "0",
        0,
        (
            "difference +0.0000 all items alike",
            "0 of 30 answers have other tokens than plain decoding. no difference: the interval",
            "All 30 items are scored alike; had 10% of all items other scores, one run of twenty",
        ),
    ),
]


@pytest.mark.parametrize(("found", "temperature", "code", "said"), FOUND)
def test_verdicts_in_words(capsys, scripted, data, monkeypatch, found, temperature, code, said):
    monkeypatch.setattr("spec_jax.cli.evaluate.evaluate", lambda *_, **__: found)
    llm = scripted()
    llm.dtype, llm.quantization = "float32", "none"
    llm.with_speculation = lambda self, config: self
    command = ("evaluate", "--task", "summarization", "--data", data, "--target", "t", *LOOKUP)
    ended, out, _ = run(capsys, *command, "--temperature", temperature, "--top-k", 9)
    words = " ".join(out.split())
    assert f"temperature {temperature}.0, top_k 9, samples 1, max_tokens 128, seed 0" in words
    assert ended == code and all(each in words for each in said), words


@pytest.mark.slow
def test_humaneval_of_a_random_model(capsys, tmp_path):
    """It writes no program that passes, but what it writes is run."""
    model = write_directory(tmp_path / "tiny", {**CONFIG, "max_position_embeddings": 1024})
    command = "evaluate --task humaneval --allow-code-execution --num-problems 2 --max-tokens 8"
    code, out, _ = run(capsys, *shlex.split(command), "--target", model, *LOOKUP)
    assert code == 3 and "0 of 2 answers have other tokens" in " ".join(out.split())


REFUSED = [
    ("--target t --draft d", "no task given"),
    ("--task humanevl --target t", "Did you mean 'humaneval'?"),
    ("--task humaneval --target t --draft d", "code that the model writes, in a subprocess"),
    ("--task humaneval --data FILE --target t --draft d", "has its own; leave it out"),
    ("--task likelihood --target t", "method is 'none'"),
    ("--task likelihood --target t --method none", "method is 'none'"),
    ("--task likelihood --data chatt --target t --draft d", "Did you mean 'chat'?"),
    ("--task speech --target t --draft d", "task 'speech' needs data"),
    ("--task speech --data gone.jsonl --target t --draft d", "'gone.jsonl': No such file"),
    ("--task likelihood --allow-code-execution --target t", "runs no code"),
    ("--task likelihood --chat --target t --draft d", "chat is for task 'humaneval'"),
    (
        "--task likelihood --target t --draft d --num-problems 1",
        "num_problems is 1; it should be at least 2",
    ),
    ("--task likelihood --target t --draft d --samples 0", "samples is 0; it should be at least 1"),
    ("--task likelihood --target t --draft d --temperature 0 --samples 2", "samples is 2, but at"),
    ("--task likelihood --target t --draft d --out FILE", "nothing is overwritten; give another"),
    ("--task likelihood", "no target given"),
]


@pytest.mark.parametrize(("flags", "said"), REFUSED, ids=[flags for flags, _ in REFUSED])
def test_mistakes(capsys, data, scripted, flags, said):
    llm = scripted()
    flags = flags.replace("FILE", str(data))
    assert said in failure(capsys, "evaluate", *shlex.split(flags))
    assert not llm.loaded


def test_a_line_without_a_key_is_named_before_a_model_is_loaded(capsys, tmp_path, scripted):
    llm, path = scripted(), tmp_path / "texts.jsonl"
    path.write_text('{"prompt": "p", "reference": "r"}\n{"prompt": "p"}\n')
    command = ("--task", "summarization", "--data", path, "--target", "t", *LOOKUP)
    assert 'line 2 has no key "reference"' in failure(capsys, "evaluate", *command)
    assert not llm.loaded
