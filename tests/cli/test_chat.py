"""`spec-jax chat`: turns, commands, interruptions."""

import time

from spec_jax.cli.interrupts import AGAIN
from tests.cli.harness import Stdin, interrupt, output, run


def chat(capsys, monkeypatch, lines: str | bytes, *flags) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.stdin", Stdin(lines))
    return run(capsys, "chat", "--target", "t", *flags)


def test_chat_keeps_the_history_until_reset(capsys, scripted, monkeypatch):
    llm = scripted((0, "an"), (0, "swer", output("answer")))
    lines = "Hello\n\nAgain?\n/reset\nNew\n/rest\n/usr/bin is a path\n/exit\nnever\n"
    code, out, err = chat(capsys, monkeypatch, lines)
    assert (code, out) == (0, "answer\n" * 4)
    assert "unknown command '/rest'. Did you mean '/reset'?" in err
    assert "6 tokens, 2.50 per target call, 24.0 per second" in err
    lengths = [prompts[0] for prompts in llm.prompts]  # the fake tokenizer's ids are lengths
    assert lengths == [[5], [5, 6, 6], [3], [3, 6, 18]]


def test_chat_says_when_the_context_is_full(capsys, scripted, monkeypatch):
    llm = scripted((0, "answer", output("answer", "length", prompt_tokens=1)))
    code, out, err = chat(capsys, monkeypatch, "Hello\nAgain?\n", "--max-model-len", "3")
    assert code == 2  # a script should notice that a turn was refused
    assert out == "answer\n" and len(llm.prompts) == 1
    assert "the context of 3 tokens is full: /reset starts a new conversation" in err
    assert "3 tokens, which leaves no room" in err and "/reset" in err.splitlines()[-1]


def test_chat_says_when_max_tokens_cut_the_answer(capsys, scripted, monkeypatch):
    scripted((0, "answer", output("answer", "length")))
    _, _, err = chat(capsys, monkeypatch, "Hello", "--max-tokens", "6")
    assert "cut at --max-tokens 6" in err


def test_chat_forgets_a_failed_turn(capsys, scripted, monkeypatch):
    llm = scripted((0, "x", output("x", "error", error="prompt 0: NaN")))
    code, _, err = chat(capsys, monkeypatch, "Hello\nAgain?\n")
    assert code == 2 and err.count("spec-jax: error: prompt 0: NaN") == 2
    assert [prompts[0] for prompts in llm.prompts] == [[5], [6]]


def test_chat_refuses_what_is_not_text(capsys, scripted, monkeypatch):
    scripted()
    code, _, err = chat(capsys, monkeypatch, b"\xff\n")
    assert code == 2 and "not UTF-8" in err
    monkeypatch.setattr("sys.stdin.readline", lambda: next(lines))
    lines = iter(["a\udcff\n", ""])  # as Python reads stray bytes in the C locale
    code, _, err = run(capsys, "chat", "--target", "t")
    assert code == 2 and "the message is not valid text: 'a\\udcff'" in err


def test_ctrl_c_interrupts_the_answer_only(scripted, terminal, monkeypatch):
    llm = scripted((0, "partial"), interrupt)
    asked, lines = [], iter(["Hello", interrupt, "Go on", None])

    def ask(prompt):
        terminal.read()
        asked.append(prompt)
        assert len(asked) <= 4
        time.sleep(1.5 * AGAIN)  # a Ctrl-C that was heard does not come back
        line = next(lines)
        if line is None:
            raise EOFError
        return line() if callable(line) else line

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr("sys.stdin", Stdin("", terminal=True))
    assert terminal.main("chat", "--target", "t") == 0
    assert [prompts[0] for prompts in llm.prompts] == [[5], [5, 7, 5]]
    text = terminal.read()
    assert text.count("(interrupted)") == 2 and text.count("(/exit or Ctrl-D ends)") == 1
    assert terminal.is_as_before()


def test_ctrl_c_ends_a_piped_chat(capsys, scripted, monkeypatch):
    scripted((0, "partial"), KeyboardInterrupt())
    assert chat(capsys, monkeypatch, "Hello\n") == (130, "partial", "")


def test_chat_with_a_model(capsys, model, monkeypatch):
    monkeypatch.setattr("sys.stdin", Stdin("hi\nho\n"))
    argv = ["chat", "--target", model, "--draft", model, "--max-tokens", "4", "--ignore-eos"]
    code, out, err = run(capsys, *argv)
    assert code == 0 and out
    assert err.count("4 tokens, ") == 2
