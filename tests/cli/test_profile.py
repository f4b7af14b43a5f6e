"""`spec-jax profile`."""

import dataclasses
import json
import shlex
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from spec_jax.benchmarking.profiling import REGIONS
from spec_jax.cli.commands import parse
from spec_jax.config import SamplingParams, SpeculativeConfig
from spec_jax.drafters.prompt_lookup import PromptLookup
from tests.cli.harness import failure, run

DECODE = "--prompt 'the in the in the' --ignore-eos --num-speculative-tokens 2 --rounds 12"


def profile(capsys, model, out, *more):
    command = ("--target", model, *shlex.split(DECODE), "--out", out, *more)
    code, said, err = run(capsys, "profile", *command)
    assert code == 0, err
    return said, err


def milliseconds(report) -> dict[str, float]:
    return {each["region"]: each["milliseconds"] for each in report["regions"]}


def check(report) -> None:
    """The regions are all of the recorded time, and their ops all of a region."""
    found = milliseconds(report)
    assert tuple(found) == REGIONS
    assert sum(found.values()) == pytest.approx(report["milliseconds"])
    assert sum(each["share"] for each in report["regions"]) == pytest.approx(1.0)
    for each in report["regions"]:
        most = [op["milliseconds"] for op in each["ops"]]
        assert most == sorted(most, reverse=True) and len(most) <= 3
        assert sum(most) <= each["milliseconds"] * (1 + 1e-9)
        a_round = each["milliseconds_per_round"]
        if each["region"] == "prefill":
            assert a_round is None
        else:
            assert a_round == pytest.approx(each["milliseconds"] / report["rounds"])


METHOD = ("--method", "prompt_lookup", "--draft-length-policy", "constant", "--json")


def test_all_of_the_time_is_shown(capsys, model, tmp_path):
    before = jax.config.jax_compilation_cache_include_metadata_in_key
    said, err = profile(capsys, model, tmp_path / "quick", *METHOD)
    quick = json.loads(said)
    assert err == "" and said.count("\n") == 1
    assert jax.config.jax_compilation_cache_include_metadata_in_key == before
    check(quick)
    assert all(time > 0 for time in milliseconds(quick).values())
    assert (quick["method"], quick["rounds"], quick["rows"]) == ("prompt_lookup", 12, 1)
    assert 12 <= quick["tokens"] <= 36
    trace = Path(quick["trace"])
    assert trace.is_relative_to(tmp_path / "quick") and trace.name.endswith(".xplane.pb")


@pytest.mark.slow
def test_a_slow_drafter_is_seen(capsys, model, tmp_path, monkeypatch):
    quick = json.loads(profile(capsys, model, tmp_path / "quick", *METHOD)[0])
    propose = PromptLookup.propose

    def planted(self, state, context):
        draft, state = propose(self, state, context)
        start = jnp.ones((256, 256)) * context.lengths[0].astype(jnp.float32)
        product = jax.lax.fori_loop(0, 40, lambda _, x: jnp.tanh(x @ start), start)
        wrong = jnp.isnan(product).sum(dtype=jnp.int32)
        return dataclasses.replace(draft, tokens=draft.tokens + wrong), state

    monkeypatch.setattr(PromptLookup, "propose", planted)
    said, _ = profile(capsys, model, tmp_path / "slow", *METHOD)
    slow = json.loads(said)
    check(slow)
    assert slow["tokens"] == quick["tokens"]
    added = {name: time - milliseconds(quick)[name] for name, time in milliseconds(slow).items()}
    assert added["propose"] > 5 * max(time for name, time in added.items() if name != "propose")


def test_flags_become_options(tmp_path):
    flags = f"say --target t --draft d --num-speculative-tokens 3 --rounds 5 --out {tmp_path}"
    options = parse("profile", shlex.split(flags))
    drafting = SpeculativeConfig(method="draft_model", draft="d", num_speculative_tokens=3)
    assert (options.speculative, options.rounds) == (drafting, 5)
    assert options.sampling == SamplingParams(max_tokens=20)  # as many as the rounds can give
    assert (options.sources, options.output) == ((("text", "say"),), tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--out new", "no target given"),
        ("--target t", "--out DIR"),
        ("--target t --out new --rounds 0", "rounds is 0; it should be at least 1."),
        ("--target t --out full", "full is not empty, and nothing is overwritten"),
        ("--target t --out full/file", "give a directory"),
        ("--target t --out none/new", "give a directory"),
        ("--target t --out new --round 3", "Did you mean '--rounds'?"),
    ],
)
def test_mistakes(capsys, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert said in failure(capsys, "profile", "say", *shlex.split(arguments))
    assert not (tmp_path / "new").exists()
