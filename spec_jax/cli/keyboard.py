"""Messages that are typed or pasted at a terminal."""

import os
import select
from collections import deque
from collections.abc import Sequence
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.input.defaults import create_input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output.defaults import create_output
from prompt_toolkit.shortcuts import CompleteStyle

from spec_jax.cli.screen import visible

PROMPT, CONTINUATION = "> ", "  "
MAX_LINE = 4096
"""Bytes of a line that a terminal collects."""
PAUSE = 0.03
"""Seconds after a line break within which more text means that all of it was pasted."""


class Keyboard:
    """Reads messages, of one line or several: pasted text is one message until Enter is pressed.

    Lines that were typed while nothing was read stay lines. It reads from the terminal `source` and
    shows it on `screen`; the Tab key completes `commands`.
    """

    def __init__(self, source: TextIO, screen: TextIO, commands: Sequence[str]):
        self._source, self._screen = source.fileno(), screen
        self._typed_ahead: deque[str] = deque()
        self._ended = False
        bindings = KeyBindings()
        bindings.add("enter")(_enter)
        bindings.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            input=create_input(source),
            output=create_output(screen),
            multiline=True,
            prompt_continuation=CONTINUATION,
            key_bindings=bindings,
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
        )

    def read(self) -> str:
        """The next message.

        Raises:
          EOFError: Ctrl-D was pressed.
          KeyboardInterrupt: Ctrl-C was pressed.
        """
        self._read_ahead()
        if self._typed_ahead:
            line = self._typed_ahead.popleft()
            shown = visible(line).encode(errors="backslashreplace").decode()
            print(f"{PROMPT}{shown}", file=self._screen, flush=True)
            return line
        if self._ended:
            raise EOFError
        return self._session.prompt().strip("\n")

    def _read_ahead(self) -> None:
        """Takes the complete lines that the terminal has collected; it keeps the last one, open."""
        while not self._ended and select.select([self._source], [], [], 0)[0]:
            typed = os.read(self._source, MAX_LINE).decode(errors="surrogateescape")
            self._ended = not typed
            # A line that came while the terminal was being switched ends as Enter does.
            self._typed_ahead.extend(typed.removesuffix("\n").split("\r") if typed else ())


def _enter(event: KeyPressEvent) -> None:
    """Sends the message, unless more text comes at once: not every terminal says what is pasted."""
    keys = event.key_processor
    if select.select([event.app.input.fileno()], [], [], PAUSE)[0]:
        keys.feed_multiple(event.app.input.read_keys())
    if any(press.key != Keys.CPRResponse for press in keys.input_queue):
        event.current_buffer.insert_text("\n")
    else:
        event.current_buffer.validate_and_handle()
