"""Chat templates, which are programs that come with checkpoints, rendered within limits."""

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_jax.errors import RequestError

SECONDS = 3.0
"""The time limit of a template."""
_SECONDS_TO_START = 120.0
_WORKER = Path(__file__).with_name("template_worker.py")


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template that turns messages into a prompt.

    It runs in the sandbox of transformers, and in a separate process that limits its time, memory
    and output, since a sandbox limits none of them.

    Attributes:
      source: the template.
      special_tokens: `bos_token`, `eos_token` and the like, which templates insert.
    """

    source: str
    special_tokens: Mapping[str, str]

    def __call__(
        self,
        messages: list[dict[str, Any]],
        **options: Any,
    ) -> str:
        """The prompt that messages make; the options are `Tokenizer.apply_chat_template`'s.

        Raises:
          RequestError: the template refuses the messages, makes no sense or meets a limit.
        """
        answer = renderer.ask(
            {
                "source": self.source,
                "special_tokens": dict(self.special_tokens),
                "messages": messages,
                "options": {"add_generation_prompt": True} | options,
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
    """The process that renders; it is started on demand, and again after it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self._owner, self._is_ready = 0, False

    def start(self) -> None:
        """Starts the process ahead of a question, and does not wait for it."""
        with self._lock, contextlib.suppress(OSError):  # the question will say what is wrong
            self._process()

    def ask(self, question: dict[str, Any]) -> dict[str, str]:
        """The answer, or `failed` if there is none in time."""
        try:
            line = json.dumps(question).encode() + b"\n"
        except (RecursionError, TypeError, ValueError) as error:
            raise RequestError(f"messages must be values that JSON can hold: {error}.") from None
        with self._lock:
            process = self._started()
            answer = b""
            try:
                answer = self._answer(process, line, SECONDS)
            finally:
                if not answer:
                    self.stop()
        if answer is None:
            return {"failed": f"took more than {SECONDS:g} seconds"}
        if not answer:
            return {"failed": "made the process that renders it fail"}
        return json.loads(answer)

    def _process(self) -> "subprocess.Popen[bytes]":
        if self._owner != os.getpid():  # a fork shares the pipes
            self.process, self._owner = None, os.getpid()
        if self.process is None or self.process.poll() is not None:
            self.stop()
            self._is_ready = False
            # Without -P its own directory would be searched for modules first.
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"},
            )
        return self.process

    def _started(self) -> "subprocess.Popen[bytes]":
        process = self._process()
        if not self._is_ready:
            if self._answer(process, b"", _SECONDS_TO_START) != b"ready\n":
                self.stop()
                raise RequestError(
                    f"chat templates cannot be rendered: {sys.executable} {_WORKER} does not start."
                )
            self._is_ready = True
        return process

    def _answer(
        self, process: "subprocess.Popen[bytes]", line: bytes, seconds: float
    ) -> bytes | None:
        """The line that answers a line; empty if the process ends, None if it is late."""
        assert process.stdin and process.stdout
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(seconds, end)
        timer.start()
        answer = b""
        try:
            with contextlib.suppress(OSError):  # it has ended
                process.stdin.write(line)
                process.stdin.flush()
                answer = process.stdout.readline()
        finally:
            timer.cancel()
        if is_late.is_set():
            return None
        return answer if answer.endswith(b"\n") else b""

    def stop(self) -> None:
        """Ends the process."""
        process, self.process = self.process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            assert pipe
            with contextlib.suppress(OSError):  # the rest of a line
                pipe.close()
        process.wait()


renderer = _Renderer()
atexit.register(renderer.stop)
