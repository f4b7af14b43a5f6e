"""What the tests of the command line share: running it, scripted models, a terminal."""

import contextlib
import io
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
from types import SimpleNamespace
from typing import Any
from unittest import mock

from spec_jax import LLM, CompletionOutput, RequestOutput
from spec_jax.cli import main, waiting
from spec_jax.outputs import SpeculativeMetrics, StreamChunk

KEYS = {"index", "prompt", "text", "token_ids", "finish_reason", "usage", "metrics"}
ESCAPE = "\x1b"
ASKS = f"{ESCAPE}[?2004h"
"""Switches bracketed paste on, as a program does that waits for a message."""


def run(capsys, *argv) -> tuple[int, str, str]:
    with mock.patch.object(waiting, "PAUSE", 3600.0):  # however slow the machine is
        code = main([str(each) for each in argv])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err


def failure(capsys, *argv) -> str:
    """The message of a run that must fail without printing a result."""
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.startswith("spec-jax: error: ") and err.count("\n") == 1
    return err.removeprefix("spec-jax: error: ").strip()


def spawn(*argv, env=None, **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "spec_jax", *map(str, argv)]
    return subprocess.Popen(command, env=os.environ | (env or {}), **options)


class Stdin(io.TextIOWrapper):
    """Standard input that holds some bytes, from a pipe or from a terminal."""

    def __init__(self, data: str | bytes, terminal: bool = False):
        super().__init__(io.BytesIO(data if isinstance(data, bytes) else data.encode()), "utf-8")
        self.isatty = lambda: terminal


def output(text: str, finish_reason="stop", *, prompt_tokens=5, error=None) -> RequestOutput:
    tokens = tuple(text.encode())
    metrics = SpeculativeMetrics(2, 8, 3, (2, 1, 0, 0), 0.5, 0.25, 0.0, len(tokens))
    completion = CompletionOutput(0, text, tokens, finish_reason, metrics, error=error)
    return RequestOutput("0", None, (0,) * prompt_tokens, (completion,))


class Scripted(LLM):
    """Answers from a script: pieces of text, exceptions to raise, results, functions to call."""

    script: tuple = ()
    loaded: tuple = ()
    prompts: tuple = ()
    max_num_seqs = 8
    engine: Any = None

    def encode_chat(self, messages, **options):
        return [len(message["content"]) for message in messages]

    def warm_up(self, sampling_params=None):
        """Compiles nothing, as answers come from the script."""

    def __init__(self, target, **arguments):
        type(self).loaded = (*self.loaded, (target, arguments))
        self.max_model_len = arguments.get("max_model_len", 100)
        self.engine = SimpleNamespace(compile_seconds=1.5, cost_profiler=None)

    def stream(self, prompts, sampling_params=None):
        type(self).prompts = (*self.prompts, prompts)
        for step in self.script:
            if isinstance(step, BaseException):
                raise step
            if callable(step):
                step()
            else:
                index, text, result = (*step, None)[:3]
                yield StreamChunk(index, text, tuple(text.encode()), result)


def interrupt() -> None:
    """What Ctrl-C does."""
    signal.raise_signal(signal.SIGINT)


def finished(count: int):
    return [(i, f"<{i}>", output(f"<{i}>")) for i in range(count)]


class Terminal:
    """A pseudo-terminal and what was written to it."""

    def __init__(self):
        self.master, self.slave = pty.openpty()
        os.set_blocking(self.master, False)
        self.before = termios.tcgetattr(self.slave)
        self.text = ""

    def resize(self, columns: int) -> None:
        termios.tcsetwinsize(self.slave, (24, columns))

    @contextlib.contextmanager
    def typing(self, monkeypatch, *messages: str):
        """Makes this standard input, where a message is typed whenever one is asked for."""
        monkeypatch.setenv("PROMPT_TOOLKIT_NO_CPR", "1")  # nobody answers here

        def type_all():
            for count, message in enumerate(messages, start=1):
                while self.read().count(ASKS) < count and not over.wait(0.01):
                    pass
                os.write(self.master, message.encode())

        over, typist = threading.Event(), threading.Thread(target=type_all)
        with open(self.slave, closefd=False) as stdin:
            monkeypatch.setattr("sys.stdin", stdin)
            typist.start()
            yield
            over.set()
            typist.join()

    def main(self, *argv) -> int:
        """Runs the command in this process; what it writes goes to the terminal."""
        with (
            open(self.slave, "w", closefd=False) as stream,
            contextlib.redirect_stdout(stream),
            contextlib.redirect_stderr(stream),
        ):
            return main(list(argv))

    def read(self) -> str:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.master, 4096):
                self.text += data.decode(errors="replace")  # a terminal echoes any byte
        return self.text

    def is_as_before(self) -> bool:
        """Whether modes are unchanged, and the cursor is shown after it was last hidden."""
        cursor = re.findall(r"\x1b\[\?25([lh])", self.read())
        return termios.tcgetattr(self.slave) == self.before and cursor[-1:] != ["l"]
