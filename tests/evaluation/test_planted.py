"""The audit that users run finds every bug that the suite must find."""

import json
import os
import subprocess
import sys

import pytest

from tests.evaluation.pairs import PROMPTS, write_pair, write_stranger
from tests.evaluation.test_planted_bugs import BUGS, plant


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    return write_stranger(tmp_path_factory.mktemp("stranger"))


def audit(root, *flags):
    """Runs `spec-jax audit --json` of the package under a folder."""
    prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    command = [sys.executable, "-m", "spec_jax", "audit", "--json", *prompts, *map(str, flags)]
    result = subprocess.run(
        command,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert result.returncode in (0, 1), result.stderr
    return result.returncode, json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_an_audit_fails_when_the_bug_is_planted(bug, pair, tmp_path):
    plant(bug, tmp_path)
    target, draft = pair
    code, report = audit(tmp_path, "--target", target, "--draft", draft)
    assert code == 1
    assert any(check["failures"] for check in report["checks"])


METHODS = {
    "draft_model": ("--draft", "DRAFT"),
    "self": ("--draft", "TARGET"),
    "block": ("--draft", "DRAFT", "--verification", "block"),
    "prefix batch": ("--draft", "DRAFT", "--scoring", "prefix_batch"),
    "several": ("--draft", "DRAFT", "--num-drafts", 2),
    "reduced": ("--draft", "DRAFT", "--draft-vocab-size", 16),
    "heuristic": ("--draft", "DRAFT", "--draft-length-policy", "heuristic"),
    "confidence": (
        "--draft",
        "DRAFT",
        "--draft-length-policy",
        "confidence",
        "--verification",
        "block",
    ),
    "retuned": ("--draft", "DRAFT", "--draft-length-policy", "confidence", "--retune-confidence"),
    "adaptive": ("--draft", "DRAFT", "--draft-length-policy", "adaptive"),
    "oracle": ("--draft", "DRAFT", "--draft-length-policy", "oracle"),
    "prompt_lookup": ("--method", "prompt_lookup"),
    "several_lookups": ("--method", "prompt_lookup", "--num-drafts", 2),
    "suffix": ("--method", "suffix"),
    "early_exit": ("--method", "early_exit", "--early-exit-layers", 1),
    "universal_vocabulary": ("--method", "universal_vocabulary", "--draft", "STRANGER"),
    "universal_text": ("--method", "universal_text", "--draft", "STRANGER"),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_an_audit_passes_without_a_bug(method, pair, stranger, tmp_path):
    plant(None, tmp_path)
    models = dict(zip(("TARGET", "DRAFT"), pair, strict=True)) | {"STRANGER": stranger}
    flags = [models.get(flag, flag) for flag in METHODS[method]]
    code, report = audit(tmp_path, "--target", pair[0], *flags)
    assert code == 0, report
    assert report["passed"] and report["tests"] > 20
