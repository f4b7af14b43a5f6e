"""Text, progress and Ctrl-C on a terminal."""

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from rich.live import Live

from spec_jax.cli.screen import visible
from tests.cli.harness import ESCAPE, Terminal, interrupt, output, spawn


def test_text_streams_and_cannot_command_the_terminal(scripted, terminal):
    seen = []
    look = lambda: seen.append(terminal.read())  # noqa: E731
    end = (0, f"{ESCAPE}[2J\r\x9b\a\n", output("end"))
    scripted((0, "first "), look, (0, "second"), look, end)
    assert terminal.main("generate", "--target", "t", "hi") == 0
    assert seen[0].endswith("first ") and seen[1].endswith("first second")
    text = terminal.read()
    assert "second\u241b[2J\u240d\\x9b\u2407\r\n" in text
    assert re.search(r"tokens .*3", text)
    assert terminal.is_as_before()


def test_progress_goes_away_before_the_text(scripted, terminal, monkeypatch):
    llm = scripted((0, "text", output("text")))
    started = llm.__init__

    def loading(self, target, *, on_progress, **arguments):
        on_progress("loading [red]t[/red]")
        started(self, target, **arguments)

    monkeypatch.setattr(llm, "__init__", loading)
    assert terminal.main("generate", "--target", "t", "hi") == 0
    text = terminal.read()
    assert "loading [red]t[/red]" in text
    assert text.index("\x1b[?25h") < text.index("text")
    assert terminal.is_as_before()


def test_ctrl_c_leaves_the_terminal_as_it_was(scripted, terminal):
    scripted((0, "so far"), KeyboardInterrupt())
    assert terminal.main("generate", "--target", "t", "hi") == 130
    assert terminal.read().endswith("so far\r\n")
    assert terminal.is_as_before()


class Finalized:
    def __del__(self):
        interrupt()


def cleared():
    """What an extension module may do: it takes the exception for its own and goes on."""
    with contextlib.suppress(KeyboardInterrupt):
        interrupt()


def broken():
    """What Ctrl-C broke off fails in another way."""
    with contextlib.suppress(KeyboardInterrupt):
        interrupt()
    raise SystemError("initialization failed")


@pytest.mark.parametrize("event", [interrupt, Finalized, cleared, broken])
def test_ctrl_c_is_not_lost(scripted, terminal, event):
    ignored = sys.unraisablehook, signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)
    scripted(event, lambda: time.sleep(20), (0, "text", output("text")))
    assert terminal.main("generate", "--target", "t", "hi") == 130
    assert "text" not in terminal.read()
    after = sys.unraisablehook, signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)
    assert after == ignored


def test_a_timer_that_was_interrupted_does_not_hold_the_process(scripted, terminal):
    """JAX starts one before it looks for a TPU, and cancels it if nothing comes in between."""
    before, after = threading.Timer(60, print), threading.Timer(60, print)
    before.start()
    scripted(after.start, interrupt)
    assert terminal.main("generate", "--target", "t", "hi") == 130
    after.join(10)
    assert not after.is_alive() and before.is_alive()
    before.cancel()


@pytest.mark.parametrize("change", ["start", "stop"])
def test_ctrl_c_while_the_terminal_changes(scripted, terminal, monkeypatch, change):
    """Half a change could not be undone: the cursor would stay hidden."""
    changes = []

    def interrupted(live, *args, **kwargs):
        changes.append(change)
        live.console.show_cursor(False)
        interrupt()
        return original(live, *args, **kwargs)

    original = getattr(Live, change)
    monkeypatch.setattr(Live, change, interrupted)
    scripted((0, "text", output("text")))
    assert terminal.main("generate", "--target", "t", "hi") == 130
    assert changes and terminal.is_as_before()


def test_an_ignored_ctrl_c_stays_ignored(scripted, terminal):
    """As in a job that a script started in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    scripted(interrupt, (0, "text", output("text")))
    assert terminal.main("generate", "--target", "t", "hi") == 0


def exit_code(process: subprocess.Popen, terminal: Terminal) -> int:
    """Waits for the end, and reads what the process writes lest it wait for us."""
    while process.poll() is None:
        terminal.read()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
    terminal.read()
    return process.returncode


@pytest.mark.slow
def test_a_process_on_a_terminal(model, terminal):
    """A whole run in a separate process; the second one is interrupted while it loads."""
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal.slave)
    argv = ["generate", "--target", model, "--max-tokens", 4, "--method", "prompt_lookup", "hi"]
    assert exit_code(spawn(*argv, **streams), terminal) == 0, terminal.text
    assert "loading" in terminal.text and "finish reason" in terminal.text
    assert terminal.is_as_before()

    terminal.text = ""
    process = spawn(*argv, **streams)
    while "loading" not in terminal.read():
        assert process.poll() is None, terminal.text
    process.send_signal(signal.SIGINT)
    # Both are 130 to a shell; an extension module decides which of them Python chooses.
    assert exit_code(process, terminal) in (130, -signal.SIGINT), terminal.text
    assert "Traceback" not in terminal.text
    assert terminal.is_as_before()


def test_an_error_is_not_broken_within_words(terminal):
    terminal.resize(30)
    assert terminal.main("generate", "--target", "t", "--top-p", "2", "hi") == 2
    lines = ["spec-jax: error: top_p is 2.0;", "it should be at most 1."]
    assert terminal.read().split("\r\n") == [*lines, ""]


def test_control_characters_become_visible():
    assert visible("a\tb\nc") == "a\tb\nc"
    assert visible("\x00\x1b\x7f\x9b") == "\u2400\u241b\u2421\\x9b"
