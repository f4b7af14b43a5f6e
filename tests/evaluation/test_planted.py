"""The audit that users run finds every bug that the suite must find."""

import json
import os
import subprocess
import sys

import jax
import pytest

from tests.evaluation.pairs import PROMPTS, write_pair
from tests.test_planted_bugs import BUGS, plant


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"))


def audit(root, *flags):
    """Runs `spec-jax audit --json` of the package under a folder."""
    names = ("compilation_cache_dir", "persistent_cache_min_compile_time_secs")
    cache = {f"JAX_{name.upper()}": str(getattr(jax.config, f"jax_{name}")) for name in names}
    prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    command = [sys.executable, "-m", "spec_jax", "audit", "--json", *prompts, *map(str, flags)]
    result = subprocess.run(
        command,
        cwd=root,
        env=os.environ | cache | {"PYTHONPATH": str(root)},
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


@pytest.mark.parametrize(
    "method",
    [
        "draft_model",
        pytest.param("self", marks=pytest.mark.slow),
        pytest.param("prompt_lookup", marks=pytest.mark.slow),
    ],
)
def test_an_audit_passes_without_a_bug(method, pair, tmp_path):
    plant(None, tmp_path)
    target, draft = pair
    flags = {
        "draft_model": ("--draft", draft),
        "self": ("--draft", target),
        "prompt_lookup": ("--method", "prompt_lookup"),
    }[method]
    code, report = audit(tmp_path, "--target", target, *flags)
    assert code == 0, report
    assert report["passed"] and report["tests"] > 20
