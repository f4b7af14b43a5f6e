"""What is waited for, where there is no terminal, and lines that break between words."""

import io
import time

import pytest
from rich.console import Console

from spec_jax.cli import waiting
from spec_jax.cli.waiting import Waiting
from spec_jax.cli.wrapping import Wrapper


@pytest.fixture
def log(monkeypatch) -> io.StringIO:
    monkeypatch.setattr(waiting, "PAUSE", 0.05)
    monkeypatch.setattr(waiting, "GROWTH", 0.0)
    return io.StringIO()


def test_long_waits_are_logged_with_their_time(log, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("spec_jax.cli.waiting.time.monotonic", lambda: now[0])
    shown = Waiting(Console(file=log, width=20), "decoding, 1 of 8 prompts done")

    def until(text: str) -> None:
        for _ in range(1000):
            if text in log.getvalue():
                return
            time.sleep(0.01)
        raise AssertionError(log.getvalue())

    shown.start()
    now[0] += 65
    shown.update("decoding, 2 of 8 prompts done")  # the clock goes on
    until("spec-jax: decoding, 2 of 8 prompts done (1 min 5 s)\n")
    shown.update("compiling [red] the decoding loop")
    now[0] += 7
    until("spec-jax: compiling [red] the decoding loop (7 s)\n")
    shown.stop()
    text = log.getvalue()
    time.sleep(0.2)
    assert log.getvalue() == text


def test_short_waits_leave_no_line(log, monkeypatch):
    monkeypatch.setattr(waiting, "PAUSE", 5.0)
    shown = Waiting(Console(file=log), "loading")
    shown.start()
    shown.stop()
    assert not log.getvalue()


def test_a_log_that_cannot_be_written_ends_the_lines_alone(monkeypatch):
    class Closed(Console):
        def on_broken_pipe(self):
            raise BrokenPipeError

        def print(self, *args, **kwargs):
            tried.append(args)
            self.on_broken_pipe()

    tried: list[tuple] = []
    monkeypatch.setattr(waiting, "PAUSE", 0.01)
    shown = Waiting(Closed(file=io.StringIO()), "loading")
    shown.start()
    time.sleep(0.2)
    shown.stop()
    assert len(tried) == 1


def screen_of(text: str) -> str:
    """What a terminal shows that obeys the two commands which take a word back."""
    lines = [""]
    position = 0
    while position < len(text):
        if text.startswith("\x1b[", position):
            end = text.index("D\x1b[K", position)
            lines[-1] = lines[-1][: -int(text[position + 2 : end])]
            position = end + 3
        elif text[position] == "\n":
            lines.append("")
        else:
            lines[-1] += text[position]
        position += 1
    return "\n".join(lines)


TEXT = "Words are not broken, not even a l-o-n-g-e-r one;\n\n  indented text\tand tabs stay."


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize("columns", [12, 17, 30, 200])
def test_lines_break_between_words_however_the_text_comes(size, columns):
    wrapper = Wrapper(lambda: columns)
    pieces = [TEXT[i : i + size] for i in range(0, len(TEXT), size)]
    shown = screen_of("".join(wrapper.feed(piece) for piece in pieces))
    assert max(len(line.expandtabs()) for line in shown.split("\n")) < columns
    assert shown.split() == TEXT.split()


@pytest.mark.parametrize("size", [1, 30])
def test_what_is_longer_than_a_line_is_broken(size):
    wrapper = Wrapper(lambda: 11)
    text = "see " + "x" * 25 + " end"
    shown = screen_of("".join(wrapper.feed(text[i : i + size]) for i in range(0, len(text), size)))
    lines = shown.split("\n")
    assert max(map(len, lines)) == 10
    assert shown.replace("\n", "").replace(" ", "") == text.replace(" ", "")


def test_without_a_width_nothing_changes():
    wrapper = Wrapper(lambda: 0)
    assert wrapper.feed(TEXT) == TEXT
