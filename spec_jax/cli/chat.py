"""`spec-jax chat`: a conversation."""

import functools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from spec_jax.cli.conversation import Conversation
from spec_jax.cli.decoding_options import ChatOptions
from spec_jax.cli.interrupts import acknowledge
from spec_jax.cli.loading import load
from spec_jax.cli.screen import Screen
from spec_jax.config import SamplingParams
from spec_jax.errors import ConfigError, RequestError, did_you_mean
from spec_jax.llm import LLM
from spec_jax.outputs import RequestOutput
from spec_jax.sharding import Layout

HELP = "/help lists the commands, /exit or Ctrl-D ends, Ctrl-C interrupts an answer"
COMMANDS = {
    "/exit": "end (or Ctrl-D)",
    "/help": "this list",
    "/reset": "begin anew; the system message stays",
    "/save FILE": "write the messages as JSON",
    "/system TEXT": "tell the model how to answer; alone, show it",
}
KEYS = """\
Enter sends. Alt-Enter begins a new line.
Pasted text is one message, whatever its lines.
Up and Down show earlier messages. Ctrl-C interrupts.
A message that begins with a slash needs a space before it."""
LONGER = ", for longer texts"


def run(options: ChatOptions, screen: Screen) -> int:
    """Converses until the input ends; returns the exit code."""
    layout = options.llm.get("layout")
    if layout and (count := Layout.read(layout).processes) > 1:
        raise ConfigError(
            f"layout {layout} is for {count} processes, but only one of them has the terminal; "
            "give chat a layout of one process, or use `spec-jax generate --chat` with this one."
        )
    if sys.stdin is None:
        raise ConfigError("standard input is closed; chat reads the messages there.")
    llm = load(options, screen, chat=True)
    encode = functools.partial(llm.encode_chat, chat_template_kwargs=options.chat_template_kwargs)
    conversation = Conversation(encode, options.system)
    screen.settle()
    return Chat(_Local(llm, options.sampling), conversation, screen).run()


class Answerer(Protocol):
    """What answers the messages of a chat."""

    def prepare(self) -> None:
        """Does what answers at a terminal should not wait for."""
        ...

    def answer(self, prompt: Any) -> Iterator[str]:
        """The pieces of an answer, to what the conversation's `encode` has made of the messages.

        Raises:
          RequestError: there is no answer.
        """
        ...

    def statistics(self) -> Iterable[str]:
        """Of the last answer, if it was complete."""
        ...


class _Local:
    """Answers with a model of this process."""

    def __init__(self, llm: LLM, sampling: SamplingParams):
        self._llm, self._sampling = llm, sampling
        self._output: RequestOutput | None = None

    def prepare(self) -> None:
        self._llm.warm_up(self._sampling)

    def answer(self, prompt: Sequence[int]) -> Iterator[str]:
        context, self._output = self._llm.max_model_len, None
        if len(prompt) >= context:
            raise RequestError(
                f"the conversation has {len(prompt)} tokens, which leaves no room for an answer in "
                f"a context of {context}; /save FILE keeps it, /reset starts a new one."
            )
        for chunk in self._llm.stream([prompt], self._sampling):
            yield chunk.text
            self._output = chunk.output
        if self._output is not None and self._output.error is not None:
            raise RequestError(self._output.error)

    def statistics(self) -> Iterator[str]:
        output, context = self._output, self._llm.max_model_len
        if output is None:
            return
        metrics = output.metrics
        yield f"{metrics.completion_tokens} tokens"
        yield f"{metrics.mean_acceptance_length:.2f} per target call"
        yield f"{metrics.tokens_per_second:.1f} per second"
        if output.finish_reason == "length" and output.usage.total_tokens >= context:
            yield f"the context of {context} tokens is full: /reset starts a new conversation"
        elif output.finish_reason == "length":
            yield f"cut at --max-tokens {self._sampling.max_tokens}"


class Chat:
    """Reads messages and commands, and writes answers."""

    def __init__(self, answerer: Answerer, conversation: Conversation, screen: Screen):
        self._answerer, self._screen = answerer, screen
        self._conversation = conversation
        self._turns = 0
        self._keyboard = None
        if sys.stdin.isatty() and (shown := screen.terminal) is not None:
            from spec_jax.cli.keyboard import Keyboard

            self._keyboard = Keyboard(sys.stdin, shown, [each.split()[0] for each in COMMANDS])

    def run(self) -> int:
        """Takes turns until the input ends."""
        code = 0
        if self._keyboard:
            self._answerer.prepare()
            self._screen.note(HELP)
        while (text := self._read()) is not None:
            if not text.strip():
                continue
            if text.strip() == "/exit":
                break
            try:
                if command := re.fullmatch(r"(/[a-z]+)(?:\s+(.*))?", text.rstrip(), re.DOTALL):
                    self._command(command[1], (command[2] or "").strip())
                else:
                    self._turn(text)
            except RequestError as error:
                self._screen.error(str(error))
                code = 2
        return 0 if self._keyboard else code

    def _read(self) -> str | None:
        """The next message, or None at the end of the input."""
        while True:
            try:
                if self._keyboard:
                    return self._keyboard.read()
                line = sys.stdin.readline()
                return line.rstrip("\r\n") if line else None
            except EOFError:
                return None
            except UnicodeDecodeError as error:
                raise RequestError(f"the input is not UTF-8 text: {error}.") from error
            except KeyboardInterrupt:
                if not self._keyboard:
                    raise
                acknowledge()
                self._screen.note("(/exit or Ctrl-D ends)")

    def _command(self, name: str, text: str) -> None:
        takes = {each.split()[0]: " " in each for each in COMMANDS}
        if name not in takes:
            hint = did_you_mean(name, takes)
            raise RequestError(
                f"unknown command {name!r}.{hint} A space before it makes it a message."
            )
        if text and not takes[name]:
            raise RequestError(f"{name} takes nothing after it, but got {text!r}.")
        if name == "/save" and not text:
            raise RequestError("no file given; write /save FILE.")
        if name == "/help":
            note = "\n".join([*(f"{each:14}{use}" for each, use in COMMANDS.items()), KEYS])
        elif name == "/reset":
            self._conversation.clear()
            note = "a new conversation starts"
        elif name == "/save":
            path, replaced = self._conversation.save(text)
            note = f"saved to {path}{', in place of what was saved before' if replaced else ''}"
        elif text:
            self._conversation.instruct(text)
            note = "the system message is set"
        else:
            system = self._conversation.system
            note = "there is no system message" if system is None else system
        self._screen.note(note)

    def _turn(self, text: str) -> None:
        """Answers one message; the turn is forgotten if there was no answer."""
        prompt = self._conversation.encode(text)
        # Programs are made for some length of text; a longer conversation needs others.
        self._screen.remark = LONGER if self._turns else ""
        self._turns += 1
        answer, statistics = "", ()
        try:
            for piece in self._answerer.answer(prompt):
                self._screen.write(piece)
                answer += piece
            statistics = self._answerer.statistics()
        except KeyboardInterrupt:
            if not self._keyboard:
                raise
            acknowledge()
            self._screen.end_line()
            self._screen.note("(interrupted)")
        except RequestError:
            self._screen.end_line()
            raise
        self._screen.end_line()
        if shown := ", ".join(statistics):
            self._screen.note(f"({shown})")
        if answer:
            self._conversation.add(text, answer)
