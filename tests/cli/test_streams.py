"""Standard streams that are closed, full or read by nobody, and Ctrl-C before anything is loaded."""

import os
import shlex
import signal
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
    "env": ("env",),
    "plan": PLAN,
    "plan --json": (*PLAN, "--json"),
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("both", [False, True], ids=["stdout", "stderr, too"])
def test_a_pipe_that_nobody_reads(name, both):
    reader, writer = os.pipe()
    os.close(reader)
    process = spawn(*COMMANDS[name], stdout=writer, stderr=writer if both else subprocess.PIPE)
    os.close(writer)
    _, err = process.communicate()
    assert process.returncode == 141 and not err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("name", COMMANDS)
def test_an_output_that_is_full(name):
    with open("/dev/full", "w") as full:
        process = spawn(*COMMANDS[name], stdout=full, stderr=subprocess.PIPE, text=True)
        _, err = process.communicate()
    message = "spec-jax: error: the output cannot be written: No space left on device.\n"
    assert (process.returncode, err) == (2, message)


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
        "import os, sys; from spec_jax.cli import streams; streams.complete();"
        "assert os.open(sys.argv[1], os.O_CREAT) > 2; print('never mind', file=sys.stderr)"
    )
    words = [sys.executable, "-c", script, str(tmp_path / "file")]
    result = subprocess.run(["sh", "-c", f"{shlex.join(words)} <&- 2>&-"], capture_output=True)
    assert (result.returncode, result.stdout) == (0, b"")


@pytest.mark.parametrize("seconds", [0.02, 0.1, 0.3, 0.6])
def test_ctrl_c_in_the_first_second(seconds):
    """From the moment on in which our own code runs; what Python does before is Python's."""
    script = (
        f"import signal; signal.setitimer(signal.ITIMER_REAL, {seconds});"
        "signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT));"
        "import runpy, sys; sys.argv = ['spec-jax', *sys.argv[1:]];"
        "runpy.run_module('spec_jax', run_name='__main__')"
    )
    command = [sys.executable, "-c", script, "generate", "--target", "gpt2/is/nowhere", "hi"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode in (130, -signal.SIGINT), result.stderr
    assert (result.stdout, result.stderr) == ("", "")
