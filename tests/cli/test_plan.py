"""`spec-jax plan`."""

import json
from pathlib import Path

import pytest

from tests.cli.harness import failure, run

ROOT = Path(__file__).parents[2]
RECIPES = {
    "--target": ROOT / "checkpoints/chinchilla-70b.toml",
    "--draft": ROOT / "checkpoints/chinchilla-draft-4b.toml",
}


def flags(layout="tpu-v4-16", **others):
    given = {**RECIPES, "--layout": ROOT / f"sharding/{layout}.toml", **others}
    return [part for flag, value in given.items() if value is not None for part in (flag, value)]


def test_without_a_layout_one_device_is_planned(capsys):
    code, out, err = run(capsys, "plan", "--target", "checkpoints/llama-1b.toml")
    words = " ".join(out.split())
    assert (code, err) == (0, "")
    assert "of llama-1b on one device, bfloat16, batch 1" in words
    assert "No time is projected: the layout has no figures of its chip." in words


@pytest.mark.parametrize(
    "method, heading",
    [
        (["none"], "llama-1b on one device, bfloat16, batch 1, 131584 KV slots a row"),
        (["prompt_lookup"], "llama-1b with prompt lookup on one device"),
        (["early_exit"], "llama-1b with its first 4 layers on one device"),
        (["early_exit", "--early-exit-layers", "1"], "llama-1b with its first 1 layer on"),
    ],
)
def test_a_plan_without_a_draft_model(capsys, method, heading):
    flags = ("--target", "checkpoints/llama-1b.toml", "--method", *method)
    code, out, _ = run(capsys, "plan", *flags)
    assert code == 0 and heading in " ".join(out.split())
    assert ("K = 4" in out) == ("none" not in method)
    code, out, _ = run(capsys, "plan", *flags, "--json")
    assert json.loads(out)["method"] == method[0]
    search = ("--layout", "tpu-v5e-8", "--search", "--batch", "1", "--context", "512")
    code, out, _ = run(capsys, "plan", *flags, *search)
    assert code == 0 and "No other draft layout" not in out


def test_quantized_matrices_on_gpus_have_no_projected_time(capsys):
    flags = ("--target", "checkpoints/llama-8b.toml", "--layout", "gpu-1", "--context", "4096")
    code, out, _ = run(capsys, "plan", *flags, "--quantization", "int4")
    out = " ".join(out.split())
    assert code == 0 and "It fits" in out and "it is not known how fast quantized" in out
    assert "projection, ms" not in out
    message = failure(capsys, "plan", *flags, "--quantization", "none,int4", "--search")
    assert "quantization is 'int4', but on GPUs it is not known" in message


def test_a_plan_for_people(capsys):
    code, out, err = run(capsys, "plan", *flags())
    assert (code, err) == (0, "")
    for text in (
        "chinchilla-70b with chinchilla-draft-4b on tpu-v4-16: 16 devices of v4, bfloat16",
        "It fits: the larger of round and prefill takes 8.57 of 30.75 GiB (by an estimate, see "
        "--compile).",
        "Rows that join while others decode take 0.42 GiB beside that.",
        "0.16 s to the first token of prompts that fill the context, read 512 tokens at a time.",
        "Projection: 3.36 tokens a round",
        "chinchilla-70b: 64,950,116,352 parameters",
        "Published for the target: 14.1 ms (Chen et al. 2023",
        "5.525 ms more than projected.",
    ):
        assert text in " ".join(out.split()), text
    lines = {line[:27].strip(): line[27:].split() for line in out.splitlines()}
    assert lines["all-reduces, computed"] == ["161", "161", "17", "10", "239"]
    assert lines["published, ms"] == ["14.1", "1.8"]
    assert len(lines["projection, ms"]) == 6


def test_a_search(capsys, tmp_path):
    file = tmp_path / "best.toml"
    given = flags(**{"--batch": "1,64", "--num-speculative-tokens": "2,4", "--out": file})
    code, out, err = run(capsys, "plan", *given, "--search")
    assert (code, err) == (0, "")
    words = " ".join(out.split())
    for text in (
        "Times are projections, if 0.8 of drafted tokens are accepted; memory is an estimate",
        "Quantization none, 2048 tokens of context: the largest of these batches that fits has 1 "
        "rows.",
        "No other draft layout is faster than the given one.",
        "best.toml has the draft on 16 devices (batch 1, context 2048, quantization none).",
    ):
        assert text in words, text
    rows = [line.split() for line in out.splitlines() if line.split()[1:2] == ["16*"]]
    assert [row[0] for row in rows] == ["1", "64"]
    assert [cell.endswith("!") for cell in rows[1][-2:]] == [True, True]
    again = flags(**{"--layout": file, "--batch": 1, "--num-speculative-tokens": 4})
    code, out, _ = run(capsys, "plan", *again, "--search", "--json")
    found = json.loads(out)
    assert code == 0 and len(found["candidates"]) == 5
    assert f"{1000 * found['best'][0]['round_seconds']:.2f}" == rows[0][3]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--batch", "1,8"], "batch is 1,8; give one value, or add --search."),
        (["--out", "x.toml"], "out is 'x.toml', which --search writes; add --search."),
        (["--search", "--compile"], "--search does without --compile; leave one of them out."),
        (["--search", "--out", "x", "--method", "none"], "but method 'none' has none; leave one"),
        (["--method", "none"], "the draft is chinchilla-draft-4b, but method 'none' does without"),
        (["--search", "--batch", "1,x"], "'x' is not an integer"),
        (["--search", "--batch", "1,0"], "batch.1 is 0; it should be at least 1."),
        (["--search", "--context", "9999"], "context is 9999, but chinchilla-70b was made for"),
        (["--top-p", "2"], "top_p is 2.0"),
    ],
)
def test_mistakes_of_a_search(capsys, arguments, said):
    assert said in failure(capsys, "plan", *flags(), *arguments)


def test_a_plan_as_json(capsys):
    code, out, _ = run(
        capsys, "plan", *flags(**{"--batch": 2, "--context": 512}), "--json", "--acceptance", "1"
    )
    plan = json.loads(out)
    assert code == 0 and out.count("\n") == 1
    assert (plan["batch"], plan["acceptance"], plan["tokens_per_round"]) == (2, 1.0, 5.0)
    assert plan["target"]["parameters"] == 64_950_116_352
    for name in ("target_call", "draft_step", "round"):
        assert {"memory_bytes_per_chip", "collectives", "projected_seconds"} <= set(plan[name])
    assert plan["fits"] is True and plan["compile_seconds"] is None


@pytest.mark.slow
def test_a_plan_that_compiles_for_cpus(capsys, model):
    own = flags("cpu-8", **{"--target": model, "--draft": model, "--dtype": "float32"})
    code, out, _ = run(capsys, "plan", *own, "--compile", "--num-speculative-tokens", "2")
    assert code == 0
    assert "all-reduce, compiled" in out and "Compiled in" in out
    words = " ".join(out.split())
    assert "No time is projected: the layout has no figures" in words
    (memory,) = (line for line in out.splitlines() if line.startswith("memory, compiled"))
    assert len(memory.split()) == 3 + 5  # of four sections and the prefill
    assert "kv_heads (2: replicated instead of 8 shards)" in words


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"--target": None}, "no target given; name the target model with --target."),
        ({"--layout": "nowhere.toml"}, "the layout nowhere.toml cannot be read"),
        ({"--draft": "nowhere.toml"}, "nowhere.toml does not exist."),
        ({"--acceptance": "2"}, "acceptance is 2.0; it should be at most 1."),
        ({"--batch": "0"}, "batch.0 is 0; it should be at least 1."),
        ({"--context": "4096"}, "context is 4096, but chinchilla-70b was made for 2048 tokens"),
        ({"--dtype": "bfloat"}, "dtype is 'bfloat'. Did you mean 'bfloat16'?"),
        ({"--quantization": "int"}, "quantization.0 is 'int'. Did you mean 'int"),
        ({"--lay": "x"}, "unknown option '--lay'. Did you mean '--layout'?"),
        ({"--tensor-parallel-size": "2"}, "option '--tensor-parallel-size'; use --layout"),
        ({"--gpu-memory-utilization": ".9"}, "leave it out: max_num_seqs and max_model_len say"),
    ],
)
def test_mistakes(capsys, changes, said):
    assert said in failure(capsys, "plan", *flags(**changes))


def test_heads_that_a_layout_cannot_cut(capsys, model):
    message = failure(capsys, "plan", *flags(**{"--target": model}))
    assert "layout tpu-v4-16 splits" in message and "16 shards" in message


def test_without_a_draft_one_is_derived(capsys):
    code, out, _ = run(capsys, "plan", *flags(**{"--draft": None}), "--json")
    plan = json.loads(out)
    assert code == 0 and plan["draft"]["name"] == "a wide and shallow draft of chinchilla-70b"
    assert plan["draft"]["parameters"] == 4_017_199_104  # the recipe's


def test_published_figures_stay_with_their_layout(capsys):
    code, out, _ = run(capsys, "plan", *flags("tpu-v5e-16"))
    assert code == 0 and "ublished" not in out
