"""Messages that are typed or pasted at a terminal."""

import select
from collections.abc import Sequence
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.input.defaults import create_input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output.defaults import create_output
from prompt_toolkit.shortcuts import CompleteStyle

PROMPT, CONTINUATION = "> ", "  "
PAUSE = 0.03
"""Seconds after a line break within which more text means that all of it was pasted."""


class Keyboard:
    """Reads messages, of one line or several: pasted text is one message until Enter is pressed.

    It reads from the terminal `source` and shows it on `screen`; the Tab key completes `commands`.
    """

    def __init__(self, source: TextIO, screen: TextIO, commands: Sequence[str]):
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
        return self._session.prompt().strip("\n")


def _enter(event: KeyPressEvent) -> None:
    """Sends the message, unless more text comes at once: not every terminal says what is pasted."""
    keys = event.key_processor
    if select.select([event.app.input.fileno()], [], [], PAUSE)[0]:
        keys.feed_multiple(event.app.input.read_keys())
    if any(press.key != Keys.CPRResponse for press in keys.input_queue):
        event.current_buffer.insert_text("\n")
    else:
        event.current_buffer.validate_and_handle()
