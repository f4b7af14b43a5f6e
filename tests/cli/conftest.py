"""Fixtures of the command line's tests."""

import os
import signal

import pytest

from tests.checkpoints import tiny
from tests.cli.harness import Scripted, Terminal


@pytest.fixture(autouse=True)
def interruptible():
    """Ctrl-C does what it does in a shell, even if the tests were started where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    """The directory of a tiny random model."""
    return str(tiny.write_directory(tmp_path_factory.mktemp("model") / "target"))


@pytest.fixture
def scripted(monkeypatch):
    """Lets `spec-jax` run a script instead of a model."""

    def use(*script) -> type[Scripted]:
        chosen = type("Chosen", (Scripted,), {"script": script})
        monkeypatch.setattr("spec_jax.cli.loading.LLM", chosen)
        return chosen

    return use


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    yield terminal
    os.close(terminal.slave)
    os.close(terminal.master)
