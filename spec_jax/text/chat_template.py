"""Chat templates, which come with checkpoints and are programs, rendered within limits."""

import atexit
import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_jax.errors import RequestError

SECONDS = 3.0
"""The longest that a template may take."""
_SECONDS_TO_START = 120.0
_WORKER = Path(__file__).with_name("template_worker.py")


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template that turns messages into a prompt.

    It is run in the sandbox of transformers, and in a process of its own that limits its time,
    memory and output, since a sandbox limits none of them.

    Attributes:
      source: the template.
      special_tokens: `bos_token`, `eos_token` and the like, which templates write out.
    """

    source: str
    special_tokens: Mapping[str, str]

    def __call__(
        self,
        messages: list[dict[str, str]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt that messages make.

        Args:
          messages: each has a `role` and its `content`.
          add_generation_prompt: ask for the assistant's next message.
          continue_final_message: leave the last message open instead.

        Raises:
          RequestError: the template refuses the messages, makes no sense or meets a limit.
        """
        answer = renderer.ask(
            {
                "source": self.source,
                "special_tokens": dict(self.special_tokens),
                "messages": messages,
                "options": {
                    "add_generation_prompt": add_generation_prompt,
                    "continue_final_message": continue_final_message,
                },
            }
        )
        if "text" in answer:
            return answer["text"]
        if "refused" in answer:
            raise RequestError(
                f"the model's chat template refuses these messages: {answer['refused']}"
            )
        raise RequestError(
            f"the model's chat template {answer['failed']}; give the model plain text, or use a "
            "checkpoint with another template."
        )


class _Renderer:
    """The process that renders; it is started when it is needed, and again if it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def ask(self, question: dict[str, Any]) -> dict[str, str]:
        """The answer, or `failed` if there is none in time."""
        try:
            line = json.dumps(question).encode() + b"\n"
        except (RecursionError, TypeError, ValueError) as error:
            raise RequestError(
                f"messages should be such that JSON can hold them: {error}."
            ) from None
        with self._lock:
            process = self._started()
            try:
                assert process.stdin
                process.stdin.write(line)
                process.stdin.flush()
                answer = self._line(process, SECONDS)
            except OSError:
                answer = b""
            if answer is None or not answer.endswith(b"\n"):
                self.stop()
                if answer is None:
                    return {"failed": f"took more than {SECONDS:g} seconds"}
                return {"failed": "made the process that renders it fail"}
        return json.loads(answer)

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._owner != os.getpid():  # a fork shares the pipes
            self.process, self._owner = None, os.getpid()
        if self.process is None or self.process.poll() is not None:
            self.stop()
            # Without -P its own directory would be searched for modules first.
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"},
            )
            if self._line(self.process, _SECONDS_TO_START) != b"ready\n":
                self.stop()
                raise RequestError(
                    f"chat templates cannot be rendered: {sys.executable} {_WORKER} does not start."
                )
        return self.process

    def _line(self, process: "subprocess.Popen[bytes]", seconds: float) -> bytes | None:
        """The next line of output; less if the process ended, and None if it takes too long."""
        assert process.stdout
        descriptor, end, found = process.stdout.fileno(), time.monotonic() + seconds, b""
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            parts: list[bytes] = []
            while not found.endswith(b"\n"):
                if not selector.select(max(0.0, end - time.monotonic())):
                    return None
                found = os.read(descriptor, 1 << 16)
                if not found:
                    break
                parts.append(found)
        return b"".join(parts)

    def stop(self) -> None:
        """Ends the process."""
        process, self.process = self.process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            assert pipe
            with contextlib.suppress(OSError):  # what was not yet written
                pipe.close()
        process.wait()


renderer = _Renderer()
atexit.register(renderer.stop)
