"""The launch scripts, as far as they go without installing anything."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [*sorted((ROOT / "launch").glob("*.sh")), ROOT / ".ci" / "run"]
COMMANDS = [path for path in SCRIPTS if path.name in ("local.sh", "test.sh")]
name = lambda path: path.name  # noqa: E731


def shell(*command, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_parses(script):
    result = shell("bash", "-n", script)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_passes_shellcheck(script):
    beside_python = Path(sys.executable).parent / "shellcheck"
    shellcheck = beside_python if beside_python.exists() else shutil.which("shellcheck")
    if not shellcheck:
        pytest.skip("shellcheck is not installed (it comes with the dev extra)")
    result = shell(shellcheck, "--external-sources", script, cwd=ROOT)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("script", [*COMMANDS, ROOT / ".ci" / "run"], ids=name)
def test_is_executable(script):
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize("script", COMMANDS, ids=name)
def test_help_works_anywhere_and_installs_nothing(script, tmp_path):
    copied = shutil.copytree(ROOT / "launch", tmp_path / "a checkout" / "launch")
    result = shell(copied / script.name, "--help", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage: launch/")
    assert [path.name for path in copied.parent.iterdir()] == ["launch"]
