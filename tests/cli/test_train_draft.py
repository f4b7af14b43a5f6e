"""`spec-jax train-draft`: runs, resumes after SIGKILL, and refuses with a remedy."""

import json
import random
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from spec_jax.checkpoints.recipe import Recipe
from tests.cli.harness import failure, run, spawn

FLAGS = (
    *("--layers", 1, "--reduced-vocab", 64, "--sample-tokens", 400, "--sequence-length", 32),
    *("--sample-batch", 8, "--held-out", 4, "--steps", 12, "--batch-size", 8),
    *("--warmup-steps", 2, "--evaluate-every", 3),
)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"the {c} in"}) + "\n" for c in "abcdefghijklmn"))
    return path


def test_a_draft_is_trained_exported_and_used(capsys, model, prompts, tmp_path):
    out = tmp_path / "run"
    args = ("train-draft", "--target", model, "--data", prompts, "--out", out, *FLAGS)
    code, said, log = run(capsys, *args)
    assert code == 0 and f"--draft {out / 'draft.toml'}" in said
    assert "12 of 12 steps: loss" in log and "accepted greedy" in log
    assert (out / "acceptance.png").read_bytes().startswith(b"\x89PNG")
    card = (out / "draft" / "README.md").read_text()
    assert "spec-jax train-draft --target" in card and "prompts.jsonl" in card
    code, text, _ = run(
        capsys,
        "generate",
        "the inn",
        "--target",
        model,
        "--draft",
        out / "draft.toml",
        "--max-tokens",
        8,
        "--json",
    )
    plain = run(capsys, "generate", "the inn", "--target", model, "--max-tokens", 8, "--json")
    assert code == 0 and json.loads(text)["token_ids"] == json.loads(plain[1])["token_ids"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--steps", 0), "steps is 0"),
        (("--objective", "mse"), "objective is 'mse'"),
        (("--width", 8), "embedding 'shared' has"),
        (("--batch-size", 8, "--accumulate", 3), "accumulate is 3"),
        (("--temperatures", "1,-1"), "temperatures.1 is -1"),
        (("--temperatures", "warm"), "'warm' is not a number"),
        (("--from-layers", "0,1,2"), "names 3 layers, but layers is 2"),
        (("--learnin-rate", 1), "Did you mean '--learning-rate'"),
        (("--data", "none.jsonl"), "none.jsonl"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(capsys, model, tmp_path, flags, message):
    out = tmp_path / "run"
    assert message in failure(capsys, "train-draft", "--target", model, "--out", out, *flags)
    assert not out.exists()


@pytest.mark.slow
def test_names_that_need_quotes(capsys, model, prompts, tmp_path):
    """Each of the recipe's texts could end it: after the training it must still be read."""
    target = tmp_path / "a \"grüße\" = 'x' \\ #1"
    shutil.copytree(model, target)
    data = shutil.copy(prompts, tmp_path / "not UTF-8 \udce9.jsonl")
    out = tmp_path / "the run's 50% {ü}"
    said = 'LicenseRef-"mine" \\ 2\n#'
    args = ("--data", data, "--out", out, "--license", said, *FLAGS, "--steps", 1)
    code, _, log = run(capsys, "train-draft", "--target", target, *args)
    assert code == 0, log
    recipe = Recipe.read(out / "draft.toml")
    assert recipe.license == said and recipe.name == "a-grue-x-1-draft"
    args = ("--target", target, "--draft", out / "draft.toml", "--max-tokens", 2, "--json")
    assert run(capsys, "generate", "the inn", *args)[0] == 0


@pytest.mark.parametrize("license", ["", "\udcff"])
def test_a_licence_that_cannot_be_written_is_refused_before_hours_of_work(
    capsys, model, tmp_path, license
):
    out = tmp_path / "run"
    args = ("train-draft", "--target", model, "--out", out, "--license", license)
    assert "license is '" in failure(capsys, *args) and not out.exists()


@pytest.mark.parametrize("sign", "[*?\\")
def test_an_output_that_orbax_could_not_read_again_is_refused(capsys, model, tmp_path, sign):
    out = tmp_path / f"run {sign}1]"
    for command in (("train-draft", "--target", model, "--out", out), ("convert", model, out)):
        assert f"holds {sign!r}, under which" in failure(capsys, *command)
    assert not list(tmp_path.iterdir())


def test_an_output_is_required(capsys, model):
    assert "--out" in failure(capsys, "train-draft", "--target", model)


@pytest.mark.slow
def test_killed_at_twenty_random_moments_it_ends_with_the_same_weights(model, prompts, tmp_path):
    def begin(out):
        args = ("train-draft", "--target", model, "--data", prompts, "--out", out, *FLAGS)
        with said.open("ab") as file:
            return spawn(*args, stdout=subprocess.DEVNULL, stderr=file)

    said = tmp_path / "said"
    for _ in range(2):  # the second time nothing is compiled, as after a kill
        started = time.monotonic()
        out = tmp_path / f"killed-{started}"
        assert begin(out).wait() == 0, said.read_text()
        whole = time.monotonic() - started
    out.rename(tmp_path / "whole")
    pick, kills = random.Random(0), 0
    while True:
        process = begin(tmp_path / "killed")
        try:
            code = process.wait(pick.uniform(0.3, 1.0) * whole if kills < 20 else None)
            assert code == 0, said.read_text()
            if kills >= 20:
                break
            # It was too quick: again.
            (tmp_path / "killed").rename(tmp_path / f"killed-{time.monotonic()}")
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
    ends = [*tmp_path.glob("killed*")]
    wanted = load_file(tmp_path / "whole" / "draft" / "model.safetensors")
    for end in ends:
        found = load_file(end / "draft" / "model.safetensors")
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            np.testing.assert_array_equal(found[name].view(np.uint16), value.view(np.uint16))
