"""`spec-jax chat`: turns, commands, interruptions."""

import errno
import json
import os
import re
import time

from spec_jax.cli.interrupts import AGAIN
from spec_jax.cli.keyboard import Keyboard
from spec_jax.errors import RequestError
from tests.cli.harness import ESCAPE, Stdin, failure, interrupt, output, run


def chat(capsys, monkeypatch, lines: str | bytes, *flags) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.stdin", Stdin(lines))
    return run(capsys, "chat", "--target", "t", *flags)


def test_chat_keeps_the_history_until_reset(capsys, scripted, monkeypatch):
    llm = scripted((0, "an"), (0, "swer", output("answer")))
    lines = "Hello\n\nAgain?\n/reset\nNew\n/rest\n/usr/bin is a path\n/exit\nnever\n"
    code, out, err = chat(capsys, monkeypatch, lines)
    assert (code, out) == (2, "answer\n" * 4)
    assert "unknown command '/rest'. Did you mean '/reset'? A space before it" in err
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
    pause = lambda: time.sleep(1.5 * AGAIN)  # noqa: E731  (a Ctrl-C that was heard stays away)
    reads = Keyboard.read
    monkeypatch.setattr(Keyboard, "read", lambda keyboard: (pause(), reads(keyboard))[1])
    with terminal.typing(monkeypatch, "Hello\r", "\x03", "Go on\r", "\x04"):
        assert terminal.main("chat", "--target", "t") == 0
    assert [prompts[0] for prompts in llm.prompts] == [[5], [5, 7, 5]]
    text = terminal.read()
    assert text.count("(interrupted)") == 2 and text.count("(/exit or Ctrl-D ends)") == 1
    assert terminal.is_as_before()


def test_a_paste_is_one_message(scripted, terminal, monkeypatch):
    """With and without the marks that most terminals put around it."""
    llm = scripted((0, "answer", output("answer")))
    marked = f"{ESCAPE}[200~one\r\rtwo\r{ESCAPE}[201~"
    with terminal.typing(monkeypatch, f"{marked}\r", "three\r\rfour\r", "a\x1b\rb\r", "/exit\r"):
        assert terminal.main("chat", "--target", "t") == 0
    assert [prompts[0] for prompts in llm.prompts] == [[8], [8, 6, 11], [8, 6, 11, 6, 3]]
    assert terminal.is_as_before()


def test_lines_typed_during_an_answer_stay_lines_and_commands(scripted, terminal, monkeypatch):
    typed = iter(["Two\rThree\r/reset\rFo", ""])

    def typist():
        os.write(terminal.master, next(typed, "").encode())
        time.sleep(0.05)

    llm = scripted(typist, (0, "answer", output("answer")))
    with terminal.typing(monkeypatch, "One\r", "ur\r", "\x04"):
        assert terminal.main("chat", "--target", "t") == 0
    assert [prompts[0] for prompts in llm.prompts] == [[3], [3, 6, 3], [3, 6, 3, 6, 5], [4]]
    assert terminal.read().count("a new conversation starts") == 1
    assert terminal.is_as_before()


def test_bytes_typed_during_an_answer_that_are_no_text_are_refused(scripted, terminal, monkeypatch):
    typed = iter([b"\xff\r"])
    llm = scripted(
        lambda: (os.write(terminal.master, next(typed, b"")), time.sleep(0.05)),
        (0, "answer", output("answer")),
    )
    with terminal.typing(monkeypatch, "One\r", "\x04"):
        assert terminal.main("chat", "--target", "t") == 0
    assert len(llm.prompts) == 1 and "is not valid text: '\\udcff'" in terminal.read()


def test_the_end_typed_during_an_answer_ends_after_the_lines_before_it(
    scripted, terminal, monkeypatch
):
    typed = iter(["Two\r\x04"])
    llm = scripted(
        lambda: (os.write(terminal.master, next(typed, "").encode()), time.sleep(0.05)),
        (0, "answer", output("answer")),
    )
    with terminal.typing(monkeypatch, "One\r"):
        assert terminal.main("chat", "--target", "t") == 0
    assert [prompts[0] for prompts in llm.prompts] == [[3], [3, 6, 3]]


def test_words_are_whole_on_a_terminal(scripted, terminal, monkeypatch):
    terminal.resize(12)
    scripted((0, "one two th"), (0, "ree 世界世界世界 four", output("x")))
    with terminal.typing(monkeypatch, "Hello\r", "\x04"):
        assert terminal.main("chat", "--target", "t") == 0
    text = re.sub(rf"\w+{ESCAPE}\[\dD{ESCAPE}\[K", "", terminal.read())  # what is taken back
    assert "one two \r\nthree 世界\r\n世界世界 \r\nfour\r\n" in text


def test_a_pause_between_turns_is_explained(scripted, terminal, monkeypatch):
    def compiling():
        llm.loaded[0][1]["on_progress"]("compiling the decoding loop")

    llm = scripted(compiling, (0, "answer", output("answer")))
    with terminal.typing(monkeypatch, "Hello\r", "Again\r", "\x04"):
        assert terminal.main("chat", "--target", "t") == 0
    first, second = re.findall(r"compiling the decoding loop(, for longer texts)?", terminal.read())
    assert (first, second) == ("", ", for longer texts")


def test_the_model_is_told_how_to_answer(capsys, scripted, monkeypatch):
    llm = scripted((0, "answer", output("answer")))
    lines = "Hello\n/system Be kind.\nAgain\n/reset\n/system\nNew\n"
    code, _, err = chat(capsys, monkeypatch, lines, "--system", "Be short!")
    assert code == 0 and "Be kind.\n" in err
    assert [prompts[0] for prompts in llm.prompts] == [[9, 5], [8, 5, 6, 5], [8, 3]]


def test_a_model_that_takes_no_system_message(capsys, scripted, monkeypatch):
    def encode(messages, **options):
        if messages[0]["role"] == "system":
            raise RequestError("the template refuses: no system role")
        return [len(each["content"]) for each in messages]

    llm = scripted((0, "answer", output("answer")))
    llm.encode_chat = staticmethod(encode)
    code, out, err = chat(capsys, monkeypatch, "/system x\nHello\n")
    assert (code, out) == (2, "answer\n") and "no system role" in err
    code, out, err = chat(capsys, monkeypatch, "Hello\n", "--system", "x")
    assert (code, out) == (2, "") and "no system role" in err


def test_a_conversation_is_saved(capsys, scripted, monkeypatch, tmp_path):
    scripted((0, "Grüße", output("answer")))
    monkeypatch.chdir(tmp_path)
    code, _, _ = chat(
        capsys, monkeypatch, "Hello\n/save c.json\nAgain\n/save c.json\n", "--system", "x"
    )
    saved = json.loads((tmp_path / "c.json").read_text("utf-8"))
    assert code == 0
    assert [each["role"] for each in saved] == ["system", *["user", "assistant"] * 2]
    assert [each["content"] for each in saved] == ["x", "Hello", "Grüße", "Again", "Grüße"]
    assert [path.name for path in tmp_path.iterdir()] == ["c.json"]


def test_what_cannot_be_saved_is_said_and_nothing_is_lost(capsys, scripted, monkeypatch, tmp_path):
    llm = scripted((0, "answer", output("answer")))
    (tmp_path / "mine").write_text("precious")
    monkeypatch.chdir(tmp_path)
    lines = "Hello\n/save no/where\n/save mine\n/save\nAgain\n/save c\n/save c\n/save c\n"
    lines += "/reset\n/save c\n"  # another conversation is not written over the first
    monkeypatch.setattr("os.replace", fails_once(os.replace))
    code, _, err = chat(capsys, monkeypatch, lines)
    assert code == 2
    assert "no/where: No such file or directory; the conversation continues" in err
    assert err.count("c, in place of what was saved before") == 1 and "c exists" in err
    assert "mine exists" in err and "/save FILE" in err and "No space left on device" in err
    assert (tmp_path / "mine").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "mine"]
    assert len(json.loads((tmp_path / "c").read_text())) == 4 and len(llm.prompts) == 2


def fails_once(works):
    answers = iter([OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))])

    def replace(*args):
        for error in answers:
            raise error
        return works(*args)

    return replace


def test_commands(capsys, scripted, monkeypatch):
    llm = scripted((0, "answer", output("answer")))
    code, _, err = chat(capsys, monkeypatch, "/help\n/reset now\n /help is a message\n")
    assert code == 2
    assert all(f"/{name} " in err for name in ("exit", "help", "reset", "save", "system"))
    assert "/reset takes nothing after it, but got 'now'" in err
    assert len(llm.prompts) == 1


def test_a_closed_input_is_said(capsys, scripted, monkeypatch):
    scripted()
    monkeypatch.setattr("sys.stdin", None)
    assert "standard input is closed" in failure(capsys, "chat", "--target", "t")


def test_ctrl_c_ends_a_piped_chat(capsys, scripted, monkeypatch):
    scripted((0, "partial"), KeyboardInterrupt())
    assert chat(capsys, monkeypatch, "Hello\n") == (130, "partial", "")


def test_chat_with_a_model(capsys, model, monkeypatch):
    monkeypatch.setattr("sys.stdin", Stdin("hi\nho\n"))
    argv = ["chat", "--target", model, "--draft", model, "--max-tokens", "4", "--ignore-eos"]
    code, out, err = run(capsys, *argv)
    assert code == 0 and out
    assert err.count("4 tokens, ") == 2
