"""The launch scripts for this machine's CPU, run for real in the environment that test.sh made."""

import contextlib
import io
import json
import subprocess
from pathlib import Path

import pytest

from spec_jax.cli import main
from tests.checkpoints.tiny import write_directory

ROOT = Path(__file__).resolve().parents[2]
PROMPT = ("--prompt", "the inn", "--max-tokens", "12", "--json")

pytestmark = pytest.mark.skipif(
    not (ROOT / ".venv" / ".installed").exists(), reason="launch/test.sh makes the environment"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_directory(tmp_path_factory.mktemp("model") / "tiny"))


def ids(*command: str) -> list[int]:
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()
    return json.loads(line)["token_ids"]


@pytest.fixture(scope="module")
def alone(model) -> list[int]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["generate", "--target", model, *PROMPT]) == 0
    return json.loads(out.getvalue())["token_ids"]


SCRIPTS = [
    ("launch/cpu_mesh.sh", "8"),
    ("launch/cpu_mesh.sh", "2"),
    ("launch/cpu_processes.sh", "2"),
]


@pytest.mark.parametrize(
    "script",
    [pytest.param(each, marks=() if each == SCRIPTS[1] else pytest.mark.slow) for each in SCRIPTS],
    ids=" ".join,
)
def test_decodes_as_one_device_does(script, model, alone):
    assert ids(*script, "generate", "--target", model, *PROMPT) == alone
    assert len(alone) == 12
