"""`spec-jax chat`: a conversation, one line a turn."""

import contextlib
import re
import sys

from spec_jax.cli.arguments import Options
from spec_jax.cli.interrupts import heard
from spec_jax.cli.loading import load
from spec_jax.cli.prompts import checked
from spec_jax.cli.screen import Screen
from spec_jax.config import SamplingParams
from spec_jax.errors import ConfigError, RequestError, did_you_mean
from spec_jax.llm import LLM
from spec_jax.outputs import RequestOutput
from spec_jax.sharding import Layout

HELP = "/reset starts a new conversation, /exit or Ctrl-D ends, Ctrl-C interrupts an answer"
COMMANDS = ("/exit", "/help", "/reset")
PROMPT = "> "


def run(options: Options) -> int:
    """Converses until the input ends; returns the exit code."""
    layout = options.llm.get("layout")
    if layout and (count := Layout.read(layout).processes) > 1:
        raise ConfigError(
            f"layout {layout} is for {count} processes, but only one of them has the terminal; "
            "give chat a layout of one process, or use `spec-jax generate --chat` with this one."
        )
    with Screen() as screen:
        llm = load(options, screen)
        llm.encode_chat([{"role": "user", "content": "Hello"}])  # needs a template
        screen.settle()
        return _Conversation(llm, options.sampling, screen).run()


class _Conversation:
    """The messages so far, and the loop that adds to them."""

    def __init__(self, llm: LLM, sampling: SamplingParams, screen: Screen):
        self._llm, self._sampling, self._screen = llm, sampling, screen
        self._messages: list[dict[str, str]] = []
        self._interactive = sys.stdin.isatty()

    def run(self) -> int:
        """Takes turns until the input ends."""
        code = 0
        if self._interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (gives input() a history and editing)
            self._screen.note(HELP)
        while (line := self._read()) is not None:
            if not line.strip():
                continue
            if re.fullmatch(r"/[a-z]+", line.strip()):
                if line.strip() == "/exit":
                    break
                self._command(line.strip())
                continue
            try:
                self._turn(line)
            except RequestError as error:
                self._screen.error(str(error))
                code = 2
        return 0 if self._interactive else code

    def _read(self) -> str | None:
        """The next line, or None at the end of the input."""
        while True:
            try:
                return self._read_line()
            except EOFError:
                if self._interactive:
                    self._screen.write("\n")
                return None
            except UnicodeDecodeError as error:
                if not self._interactive:
                    raise RequestError(f"the input is not UTF-8 text: {error}.") from error
                self._screen.error(f"that is not UTF-8 text: {error}")
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                heard()
                self._screen.note("\n(/exit or Ctrl-D ends)")

    def _read_line(self) -> str:
        if self._interactive and self._screen.is_terminal:
            return input(PROMPT)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\r\n")

    def _command(self, command: str) -> None:
        if command == "/reset":
            self._messages.clear()
            self._screen.note("a new conversation starts")
        elif command == "/help":
            self._screen.note(HELP)
        else:
            self._screen.note(f"unknown command {command!r}.{did_you_mean(command, COMMANDS)}")

    def _turn(self, text: str) -> None:
        """Answers one message; the turn is forgotten if there was no answer."""
        asked = [*self._messages, {"role": "user", "content": checked(text, "the message")}]
        ids = self._llm.encode_chat(asked)
        context = self._llm.max_model_len
        if len(ids) >= context:
            raise RequestError(
                f"the conversation has {len(ids)} tokens, which leaves no room for an answer in a "
                f"context of {context}; /reset starts a new one."
            )
        answer, output = "", None
        try:
            for chunk in self._llm.stream([ids], self._sampling):
                self._screen.write(chunk.text)
                answer, output = answer + chunk.text, chunk.output
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            heard()
            self._screen.end_line()
            self._screen.note("(interrupted)")
        self._screen.end_line()
        if output is not None:
            self._report(output)
        if answer and (output is None or output.error is None):
            self._messages = [*asked, {"role": "assistant", "content": answer}]

    def _report(self, output: RequestOutput) -> None:
        """One line of statistics, and why the answer stopped if that was not its own end."""
        if output.error is not None:
            raise RequestError(output.error)
        metrics = output.metrics
        parts = [
            f"{metrics.completion_tokens} tokens",
            f"{metrics.mean_acceptance_length:.2f} per target call",
            f"{metrics.tokens_per_second:.1f} per second",
        ]
        if output.finish_reason == "length":
            if output.usage.total_tokens >= self._llm.max_model_len:
                parts.append(
                    f"the context of {self._llm.max_model_len} tokens is full: "
                    "/reset starts a new conversation"
                )
            else:
                parts.append(f"cut at --max-tokens {self._sampling.max_tokens}")
        self._screen.note(f"({', '.join(parts)})")
