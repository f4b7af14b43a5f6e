"""`spec-jax audit`."""

import json
import shlex

import pytest

from spec_jax.cli.audit_arguments import parse_audit
from spec_jax.config import SamplingParams, SpeculativeConfig
from spec_jax.evaluation.audit import GREEDY_TOKENS
from spec_jax.evaluation.report import Check, judge
from tests.cli.harness import failure, run

QUICK = ("--max-tokens", "4", "--num-speculative-tokens", "1", "--samples", "16")


def test_flags_become_options():
    flags = "--target t --draft d --top-p 0.5 --seed 3 --samples 9 --prompt p"
    options = parse_audit(shlex.split(flags))
    assert options.speculative == SpeculativeConfig(method="draft_model", draft="d")
    assert options.settings == {"as given": SamplingParams(temperature=1.0, top_p=0.5)}
    assert (options.seed, options.samples, options.sources) == (3, 9, (("text", "p"),))
    plain = parse_audit(["--target", "t"])
    assert (plain.settings, plain.samples, plain.max_tokens) == (None, None, GREEDY_TOKENS)
    assert parse_audit(["--target", "t", "--temperature", "0"]).settings == {}


def test_an_audit_for_people(capsys, model):
    options = ("--method", "prompt_lookup", "--temperature", "0.8", *QUICK)
    code, out, err = run(capsys, "audit", "--target", model, *options)
    words = " ".join(out.split())
    assert (code, err) == (0, "")
    for text in (
        "method prompt_lookup, verification token",
        "check verdict looked at",
        "greedy: plain tokens PASS 3 texts, 12 tokens",
        "sampled: follow p PASS",
        "PASS: nothing is lost.",
    ):
        assert text in words, text


def test_an_audit_as_json(capsys, model):
    code, out, _ = run(
        capsys, "audit", "--target", model, "--method", "prompt_lookup", *QUICK, "--json",
        "--prompt", "the in the in the", "--temperature", "0",
    )  # fmt: skip
    report = json.loads(out)
    assert code == 0 and out.count("\n") == 1 and report["passed"] is True
    assert (report["method"], report["draft"], report["tests"]) == ("prompt_lookup", None, 0)
    found = {check["name"]: check["status"] for check in report["checks"]}
    assert found["greedy: plain tokens"] == "PASS" and found["sampled: follow p"] == "NOT RUN"


def test_a_failed_audit_ends_with_1(capsys, model, monkeypatch):
    failed = Check("sampled: follow p", failures=["tokens that the target never says."])
    report = judge([failed], {})
    monkeypatch.setattr("spec_jax.cli.audit.audit", lambda *args, **options: report)
    code, out, _ = run(capsys, "audit", "--target", model, "--method", "prompt_lookup", *QUICK)
    assert code == 1
    assert "tokens that the target never says." in " ".join(out.split())
    assert out.rstrip().endswith("FAIL: see above.")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no target given"),
        (("--target", "t", "--samples", "0"), "samples is 0; give at least 1."),
        (("--target", "t", "--seed", "-1"), "seed is -1; give at least 0."),
        (("--target", "t", "--sample", "9"), "Did you mean '--samples'?"),
        (("--target", "t", "--method", "draft_model"), "needs draft=..."),
        (
            (
                "--target",
                "t",
                "--method",
                "suffix",
                "--verification",
                "greedy",
                "--temperature",
                "1",
            ),
            "exact at temperature 0 only",
        ),
    ],
)
def test_mistakes(capsys, arguments, said):
    assert said in failure(capsys, "audit", *arguments)
