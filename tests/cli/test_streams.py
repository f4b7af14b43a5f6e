"""Standard streams that are closed, full or read by nobody; Ctrl-C before anything is loaded."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.harness import spawn

ROOT = Path(__file__).parents[2]
PLAN = (
    *("plan", "--target", ROOT / "checkpoints/chinchilla-70b.toml"),
    *("--layout", ROOT / "sharding/tpu-v4-16.toml"),
)
COMMANDS = {
    "--help": ("--help",),
    "generate --help": ("generate", "--help"),
    "plan": PLAN,
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_pipe_that_nobody_reads(name):
    reader, writer = os.pipe()
    os.close(reader)
    process = spawn(*COMMANDS[name], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    _, err = process.communicate()
    assert process.returncode == 141 and not errors(err)


def test_a_pipe_for_errors_that_nobody_reads():
    reader, writer = os.pipe()
    os.close(reader)
    process = spawn("generate", "--help", stdout=writer, stderr=writer)
    os.close(writer)
    assert process.wait() == 141


def errors(text: str) -> list[str]:
    """Lines but for those that say what the program waits for."""
    return [line for line in text.splitlines() if not re.fullmatch(r"spec-jax: .* s\)", line)]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("name", COMMANDS)
def test_an_output_that_is_full(name):
    with open("/dev/full", "w") as full:
        process = spawn(*COMMANDS[name], stdout=full, stderr=subprocess.PIPE, text=True)
        _, err = process.communicate()
    message = "spec-jax: error: the output cannot be written: No space left on device."
    assert (process.returncode, errors(err)) == (2, [message])


@pytest.mark.parametrize(
    ("argv", "redirection", "said"),
    [
        (("generate", "--target", "t", "hi"), ">&-", "standard output is closed; send it"),
        (("generate", "--target", "t"), "<&-", "no prompt given"),
        (("generate", "--target", "t", "--prompt-file", "-"), "<&-", "standard input is closed"),
        (("chat", "--target", "t"), "<&-", "standard input is closed"),
    ],
)
def test_a_closed_stream_is_said(argv, redirection, said):
    command = f"{shlex.join([sys.executable, '-m', 'spec_jax', *argv])} {redirection}"
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith("spec-jax: error: ") and result.stderr.count("\n") == 1
    assert said in result.stderr


def test_nothing_takes_the_place_of_a_closed_stream(tmp_path):
    """The next file that is opened would, and what goes to the stream would go there."""
    script = (
        "import os, sys; from spec_jax.cli import streams; streams.open_closed();"
        "assert os.open(sys.argv[1], os.O_CREAT) > 2; print('never mind', file=sys.stderr)"
    )
    words = [sys.executable, "-c", script, str(tmp_path / "file")]
    result = subprocess.run(["sh", "-c", f"{shlex.join(words)} <&- 2>&-"], capture_output=True)
    assert (result.returncode, result.stdout) == (0, b"")


@pytest.mark.parametrize("module", ["spec_jax.cli", "pydantic", "spec_jax.cli.generate", "jax"])
def test_ctrl_c_during_imports(module):
    """What comes before the first of ours is Python's own."""
    script = f"""
import runpy, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
sys.argv = ["spec-jax", "generate", "--target", "no/where", "hi"]
runpy.run_module("spec_jax", run_name="__main__")
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")
