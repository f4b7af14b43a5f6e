"""The messages of a conversation, and the file that they are saved to."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spec_jax.cli.prompts import checked
from spec_jax.errors import RequestError
from spec_jax.files import replace_text


class Conversation:
    """The messages so far, after a system message if there is one.

    Args:
      encode: messages -> what is answered, such as token ids by the model's chat template.
      system: the system message, or None.

    Raises:
      RequestError: the model has no chat template, or one that refuses system messages.
    """

    def __init__(
        self, encode: Callable[[Sequence[dict[str, str]]], Any], system: str | None = None
    ):
        self._encode = encode
        self._turns: list[tuple[str, str]] = []
        self._saved: set[Path] = set()
        self.system: str | None = None
        self.instruct(system)

    def _messages(self, *more: tuple[str, str]) -> list[dict[str, str]]:
        system = [] if self.system is None else [("system", self.system)]
        pairs = (*system, *self._turns, *more)
        return [{"role": role, "content": content} for role, content in pairs]

    def instruct(self, system: str | None) -> None:
        """Replaces the system message; without one the template's own applies."""
        before, self.system = self.system, system and checked(system, "the system message")
        try:
            self._encode(self._messages(("user", "Hello")))
        except RequestError:
            self.system = before
            raise

    def encode(self, question: str) -> Any:
        """The encoded conversation with one more question, which is not kept."""
        return self._encode(self._messages(("user", checked(question, "the message"))))

    def add(self, question: str, answer: str) -> None:
        """Keeps a turn."""
        self._turns += [("user", question), ("assistant", answer)]

    def clear(self) -> None:
        """Forgets all turns, and which files hold them; the system message stays."""
        self._turns.clear()
        self._saved.clear()

    def save(self, name: str) -> tuple[Path, bool]:
        """Writes the messages as a JSON list, which `LLM.chat` takes.

        Returns the file's path, and whether it held an earlier state of this conversation.

        Raises:
          RequestError: the file holds something else, or cannot be written; it is as it was.
        """
        path = Path(name).expanduser().absolute()
        exists = path.exists()
        if exists and path not in self._saved:
            raise RequestError(f"{name} exists and is not of this conversation; name another file.")
        try:
            replace_text(path, json.dumps(self._messages(), ensure_ascii=False, indent=2) + "\n")
        except OSError as error:
            raise RequestError(
                f"cannot write {name}: {error.strerror}; the conversation continues."
            ) from error
        self._saved.add(path)
        return path, exists
