"""`spec-jax audit`."""

import json
import shlex

import pytest

from spec_jax.cli.commands import parse
from spec_jax.config import SamplingParams, SpeculativeConfig
from spec_jax.evaluation.audit import GREEDY_TOKENS
from spec_jax.evaluation.verdict import Check, judge
from tests.cli.harness import failure, run

QUICK = ("--max-tokens", "4", "--num-speculative-tokens", "1", "--samples", "16")


def test_flags_become_options():
    flags = "--target t --draft d --top-p 0.5 --seed 3 --samples 9 --prompt p"
    options = parse("audit", shlex.split(flags))
    drafting = SpeculativeConfig(
        method="draft_model",
        draft="d",
        num_speculative_tokens=4,
        draft_length_policy="constant",  # else an audit would see nothing where no draft pays
    )
    assert options.speculative == drafting
    assert options.settings == {"as given": SamplingParams(temperature=1.0, top_p=0.5)}
    assert (options.seed, options.samples, options.sources) == (3, 9, (("text", "p"),))
    plain = parse("audit", ["--target", "t"])
    assert (plain.settings, plain.samples, plain.max_tokens) == (None, None, GREEDY_TOKENS)
    assert not plain.allow_untested and parse("audit", ["--target", "t", "--allow-untested"])
    assert parse("audit", ["--target", "t", "--temperature", "0"]).settings == {}


@pytest.mark.parametrize(
    ("flags", "lookahead"),
    [
        ("--method prompt_lookup", 4),
        ("--draft d --draft-length-policy heuristic", 4),
        ("--draft d --num-speculative-tokens 7", 7),
        ("--method none", None),
    ],
)
def test_an_audit_has_a_k_of_its_own(flags, lookahead):
    options = parse("audit", ["--target", "t", *shlex.split(flags)])
    assert options.speculative.num_speculative_tokens == lookahead


def test_help_shows_the_audits_own_defaults(capsys):
    _, out, _ = run(capsys, "audit", "--help")
    words = " ".join(out.split())
    assert "0 is greedy (default: 1.0)" in words and "drafted in a round (default: 4)" in words
    assert "drafted in a round (default: 4; where" not in words
    _, out, _ = run(capsys, "generate", "--help")
    words = " ".join(out.split())
    assert "0 is greedy (default: 0.0)" in words
    assert "(default: 8 if adaptive, 4 if constant, else 20)" in words


@pytest.mark.slow
def test_an_audit_for_people(capsys, model):
    options = ("--method", "prompt_lookup", "--temperature", "0.8", *QUICK)
    code, out, err = run(capsys, "audit", "--target", model, *options, "--allow-untested")
    words = " ".join(out.split())
    assert (code, err) == (0, "")
    for text in (
        "method prompt_lookup, verification coupled",
        "check verdict looked at",
        "greedy: plain tokens PASS 3 texts, 12 tokens",
        "sampled: follow p PASS",
        "nothing is lost",
    ):
        assert text in words, text


@pytest.mark.slow
def test_an_audit_as_json(capsys, model):
    code, out, _ = run(
        capsys, "audit", "--target", model, "--method", "prompt_lookup", *QUICK, "--json",
        "--prompt", "the in the in the", "--temperature", "0",
    )  # fmt: skip
    report = json.loads(out)
    assert out.count("\n") == 1 and report["verdict"] != "FAIL"
    assert code == (0 if report["passed"] else 3) and report["passed"] == (not report["untested"])
    assert (report["method"], report["draft"], report["tests"]) == ("prompt_lookup", None, 0)
    found = {check["name"]: check["status"] for check in report["checks"]}
    assert found["greedy: plain tokens"] == "PASS" and found["sampled: follow p"] == "NOT TESTED"
    (sampled,) = (check for check in report["checks"] if check["name"] == "sampled: follow p")
    assert sampled["excused"] and sampled["not_tested_because"] == "temperature is 0"


def test_a_failed_audit_ends_with_1(capsys, model, monkeypatch):
    failed = Check("sampled: follow p", failures=["tokens that the target never says."])
    report = judge([failed], {})
    monkeypatch.setattr("spec_jax.cli.audit.audit", lambda *args, **options: report)
    code, out, _ = run(capsys, "audit", "--target", model, "--method", "prompt_lookup", *QUICK)
    assert code == 1
    assert "tokens that the target never says." in " ".join(out.split())
    assert out.rstrip().endswith("FAIL: see above.")


@pytest.mark.parametrize(("flags", "code"), [((), 3), (("--allow-untested",), 0)])
def test_an_audit_that_saw_nothing_does_not_pass(capsys, model, monkeypatch, flags, code):
    seen = Check("greedy: plain tokens", comparisons=3)
    unseen = Check("drafted: follow q", reason="nothing was drafted")
    excused = Check("rows: among many", reason="in bfloat16 it may differ", excused=True)
    for checks, expected, verdict in (
        ([seen, unseen, excused], code, "NOT TESTED: nothing is lost in what was looked at."),
        ([seen, excused], 0, "PASS: nothing is lost. Not tested: rows: among many."),
    ):
        report = judge(checks, {})
        monkeypatch.setattr("spec_jax.cli.audit.audit", lambda *_, given=report, **__: given)
        command = ("audit", "--target", model, "--method", "none", *flags)
        found, out, _ = run(capsys, *command)
        words = " ".join(out.split())
        assert found == expected and verdict in words
        assert "rows: among many NOT TESTED" in words and "it may differ." in words
        found, out, _ = run(capsys, *command, "--json")
        report = json.loads(out)
        assert found == expected and report["passed"] == (len(checks) == 2)
        assert report["untested"] == ([unseen.name] if unseen in checks else [])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no target given"),
        (("--target", "t", "--samples", "0"), "samples is 0; it should be at least 1."),
        (("--target", "t", "--seed", "-1"), "seed is -1; it should be at least 0."),
        (("--target", "t", "--sample", "9"), "Did you mean '--samples'?"),
        (("--target", "t", "--method", "draft_model"), "needs draft=..."),
    ],
)
def test_mistakes(capsys, arguments, said):
    assert said in failure(capsys, "audit", *arguments)
