"""What `spec-jax generate` prints, where, and how it ends."""

import dataclasses
import json
import re
import subprocess
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import LLM
from tests.checkpoints import tiny
from tests.cli.harness import ESCAPE, KEYS, failure, finished, output, run, spawn


def test_one_prompt_prints_its_text_and_statistics_apart(capsys, scripted):
    scripted((0, "[bold]lit"), (0, f"eral[/]{ESCAPE}", output("", "length")))
    code, out, err = run(capsys, "generate", "--target", "t", "--method", "prompt_lookup", "hi")
    assert (code, out) == (0, f"[bold]literal[/]{ESCAPE}\n")  # a pipe gets what the model said
    assert ESCAPE not in err
    assert re.search(r"finish reason +length", err)
    assert re.search(r"drafted tokens accepted +3 of 8 \(38%\)", err)
    assert re.search(r"accepted per position +100% 50% 0% 0%", err)
    assert re.search(r"tokens per target call +2\.50", err)
    assert re.search(r"compile +1\.50 s", err)


def test_several_prompts_are_printed_in_order_under_headings(capsys, scripted):
    steps = [(1, "B"), (0, "a"), (1, "b", output("Bb")), (0, "A", output("aA", "length"))]
    scripted(*steps, (2, "c\n", output("c\n")))
    flags = ["--prompt", "first", "--prompt", "second  \n line", "--prompt", "x" * 100]
    code, out, err = run(capsys, "generate", "--target", "t", *flags)
    assert code == 0
    assert out.splitlines() == [
        "==> prompt 0: first <==",
        "aA",
        "==> prompt 1: second line <==",
        "Bb",
        f"==> prompt 2: {'x' * 59}… <==",
        "c",
    ]
    assert re.search(r"finish reason +1 length, 2 stop", err)
    assert re.search(r"tokens per second +24\.0", err)  # 6 tokens in one batch of 0.25 s


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_failed_request_does_not_hide_the_others(capsys, scripted, flags):
    failed = output("a", "error", error="prompt 0: its logits hold a NaN.")
    scripted((0, "a", failed), (1, "fine", output("fine")))
    argv = ("generate", "--target", "t", "--prompt", "p", "--prompt", "q", *flags)
    code, out, err = run(capsys, *argv)
    assert code == 2
    assert "fine" in out and err.endswith("spec-jax: error: prompt 0: its logits hold a NaN.\n")
    if flags:
        first, second = map(json.loads, out.splitlines())
        assert first["error"] == failed.error and "error" not in second


def test_ctrl_c_ends_quietly_and_keeps_what_was_printed(capsys, scripted):
    scripted((0, "so far"), KeyboardInterrupt())
    assert run(capsys, "generate", "--target", "t", "hi") == (130, "so far", "")


def test_without_a_seed_runs_differ(capsys, scripted):
    llm = scripted(*finished(1))
    for _ in range(2):
        run(capsys, "generate", "--target", "t", "hi")
    (_, first), (_, second) = llm.loaded
    assert first["seed"] != second["seed"]


@pytest.mark.parametrize("costs", [{}, {"bucket": np.array([0.125, 0.25])}])
def test_the_saving_is_estimated(capsys, scripted, costs):
    llm = scripted(*finished(2))
    ready = llm.__init__

    def measured(self, *args, **kwargs):
        ready(self, *args, **kwargs)
        self.engine.cost_profiler = SimpleNamespace(costs=costs)

    llm.__init__ = measured
    prompts = ["--prompt", "p", "--prompt", "q"]
    _, _, err = run(capsys, "generate", "--target", "t", "--method", "prompt_lookup", *prompts)
    if costs:  # two rows side by side, three steps each, in the 0.25 s that two rounds took
        assert re.search(r"estimated speed-up +1\.50x, by the measured time of a plain step", err)
    else:
        assert re.search(r"estimated speed-up +at most 1\.50x; --compare measures it", err)


def test_plain_decoding_is_said_to_be_plain(capsys, scripted):
    plain = dataclasses.replace(output("text").metrics, draft_tokens=0)
    completion = dataclasses.replace(output("text").outputs[0], metrics=plain)
    scripted((0, "text", dataclasses.replace(output("text"), outputs=(completion,))))
    _, _, err = run(capsys, "generate", "--target", "t", "hi")
    assert "estimated" not in err and "--method prompt_lookup or --draft REF" in err


SPECULATION = {
    "none": ["--method", "none"],
    "prompt_lookup": ["--method", "prompt_lookup", "--num-speculative-tokens", "3"],
    "draft_model": ["--num-speculative-tokens", "2", "--draft-length-policy", "constant"],
}


@pytest.mark.slow
def test_every_method_gives_the_same_greedy_text(capsys, model):
    results = {}
    for method, flags in SPECULATION.items():
        draft = ["--draft", model] if method == "draft_model" else []
        argv = [
            "generate",
            "--target",
            model,
            "--max-tokens",
            "12",
            "--json",
            "--ignore-eos",
            "the the",
        ]
        code, out, err = run(capsys, *argv, *flags, *draft)
        assert (code, err) == (0, "")
        results[method] = json.loads(out)
        assert set(results[method]) == KEYS
    assert results["none"]["token_ids"] == results["prompt_lookup"]["token_ids"]
    assert results["none"]["token_ids"] == results["draft_model"]["token_ids"]
    assert results["draft_model"]["metrics"]["rounds"] == 4


def test_compare_shows_both_runs(capsys, model):
    argv = ["generate", "--target", model, "--draft", model, "--max-tokens", "8", "--compare"]
    argv += ["--draft-length-policy", "constant"]
    code, out, err = run(capsys, *argv, "--ignore-eos", "hi")
    assert code == 0 and out
    assert re.search(r"draft_model +plain", err)
    assert re.search(r"target calls +2 +8", err)
    assert re.search(r"target calls saved +6 of 8 \(75%\)", err)
    assert "estimated" not in err
    assert re.search(r"speed-up +\d+\.\d\dx", err)
    assert re.search(r"same text as plain +yes", err)
    code, out, err = run(
        capsys, *argv, "--ignore-eos", "--json", "--prompt", "hi", "--prompt", "ho"
    )
    assert (code, err) == (0, "")
    for line in out.splitlines():
        result = json.loads(line)
        assert set(result) == KEYS | {"plain", "identical"} and result["identical"] is True
        assert set(result["plain"]) == set(result["metrics"])
        assert (result["metrics"]["rounds"], result["plain"]["rounds"]) == (2, 8)
        assert result["metrics"]["compile_seconds"] == 0


def test_compare_without_speculation_or_certainty(capsys, model):
    argv = ["generate", "--target", model, "--max-tokens", "2", "--compare", "hi"]
    code, _, err = run(capsys, *argv)
    assert code == 0 and "nothing to compare" in err
    sampled = ["--method", "prompt_lookup", "--temperature", "1", "--seed", "1", "--json"]
    code, out, _ = run(capsys, *argv, *sampled)
    assert code == 0 and json.loads(out)["identical"] is None


def test_a_seed_makes_sampling_reproducible(capsys, model):
    argv = ["generate", "--target", model, "--max-tokens", "8", "--temperature", "1", "--json"]
    texts = [run(capsys, *argv, "--seed", seed, "hi")[1] for seed in (1, 1, 2)]
    first, same, other = (json.loads(text)["token_ids"] for text in texts)
    assert first == same != other


def test_logprobs_and_stop_tokens(model, capsys):
    argv = ["generate", "--target", model, "--max-tokens", 8, "--json", "--logprobs", 1, "hi"]
    code, out, _ = run(capsys, *argv)
    whole = json.loads(out)
    ids = whole["token_ids"]
    own = [place[str(token)] for token, place in zip(ids, whole["logprobs"], strict=True)]
    assert code == 0 and {each["rank"] for each in own} == {1}  # greedy
    assert sum(each["logprob"] for each in own) == pytest.approx(whole["cumulative_logprob"])
    stops = sorted({ids[2], 5})
    code, out, _ = run(capsys, *argv, "--stop-token-ids", ",".join(map(str, stops)))
    cut = json.loads(out)["token_ids"]
    assert code == 0 and cut == ids[: min(ids.index(each) for each in stops if each in ids) + 1]


@pytest.mark.slow
def test_json_is_utf8_and_alone_on_standard_output_in_any_locale(model, tmp_path):
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": "gr\u00fc\u00dfe"}\n{"prompt": "second"}\n', "utf-8"
    )
    argv = ["generate", "--target", model, "--max-tokens", 6, "--json", "--ignore-eos", "--chat"]
    process = spawn(
        *argv,
        *("--prompt-file", tmp_path / "p.jsonl", "--max-num-seqs", 1),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A damaged cache of compiled programs would be warned of.
        env={
            "LC_ALL": "C",
            "PYTHONIOENCODING": "ascii",
            "JAX_ENABLE_COMPILATION_CACHE": "false",
        },
    )
    out, err = process.communicate()
    assert process.returncode == 0
    # It may take long enough to say what it waits for.
    assert all(line.startswith(b"spec-jax: ") for line in err.splitlines()), err
    results = [json.loads(line) for line in out.decode("utf-8").splitlines()]
    assert [set(result) for result in results] == [KEYS, KEYS]
    assert [(each["index"], each["prompt"]) for each in results] == [
        (0, "gr\u00fc\u00dfe"),
        (1, "second"),
    ]
    assert results[0]["usage"]["prompt_tokens"] > results[1]["usage"]["prompt_tokens"]
    assert "\ufffd" in out.decode("utf-8")  # non-ASCII text is written as it is


@pytest.fixture
def bad(tmp_path):
    """Writes a checkpoint and damages it."""

    def write(config=None, tensors=None, truncate=False) -> str:
        path = tiny.write_directory(tmp_path / "bad", tiny.CONFIG | (config or {}), tensors)
        if truncate:
            file = path / "model.safetensors"
            file.write_bytes(file.read_bytes()[:-100])
        return str(path)

    return write


def test_bad_checkpoints(capsys, bad):
    def message(target) -> str:
        return failure(capsys, "generate", "--target", target, "hi")

    assert "no/such/place.gguf" in message("no/such/place.gguf")
    assert "model.safetensors" in message(bad(truncate=True))
    tensors = tiny.llama_tensors(tiny.CONFIG)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
    assert "model.norm.weight" in message(bad(tensors=tensors))
    assert "'lama'" in message(bad({"model_type": "lama"}))


def test_a_draft_of_another_tokenizer(capsys, model, tmp_path):
    draft = tiny.write_directory(tmp_path / "draft", tiny.CONFIG)
    tokens = list(tiny.TOKENS)
    first, second = tokens.index("A"), tokens.index("B")
    tokens[first], tokens[second] = "B", "A"
    tiny.write_tokenizer(draft, tokens)
    message = failure(capsys, "generate", "--target", model, "--draft", draft, "hi")
    assert f"{first} is 'A' and 'B'" in message and "prompt_lookup" in message


def test_a_full_memory_is_told_with_what_would_take_less(capsys, model, monkeypatch):
    monkeypatch.setattr(LLM, "stream", lambda self, *args: jnp.zeros((1 << 48,), jnp.int8))
    message = failure(capsys, "generate", "the", "--target", model)
    assert "Out of memory allocating" in message and "--max-num-seqs" in message


def test_prompts_that_cannot_be_decoded(capsys, model, tmp_path):
    generate = ("generate", "--target", model)
    assert "a prompt is empty" in failure(capsys, *generate, "--prompt", "")
    message = failure(capsys, *generate, "--max-model-len", "16", "much too long a prompt")
    assert "prompt 0 has " in message and "16" in message
    assert "max_model_len is 129" in failure(capsys, *generate, "--max-model-len", "129", "hi")
    plain = tiny.write_directory(tmp_path / "plain", tiny.CONFIG)
    tiny.write_tokenizer(plain, template=None)
    message = failure(capsys, "generate", "--target", plain, "--chat", "hi")
    assert "chat template" in message
    assert "chat template" in failure(capsys, "chat", "--target", plain)
