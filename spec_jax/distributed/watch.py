"""Ends a process whose peers give no sign of life: they died, were stopped or cannot be reached.

JAX ends such a process too, but with a stack trace, after a longer wait if the peer was stopped,
and even if all processes were stopped together and are resumed.
"""

import contextlib
import itertools
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax

from spec_jax.errors import PEER_LOST, printable

_BEAT = 1.0
"""Seconds between two signs of life."""
_MAX_SILENT = 15
"""Beats of this process without a sign of a peer; none pass while this process is stopped too."""
MAX_SILENCE = (_MAX_SILENT + 2) * _BEAT
"""Seconds after which every process names a peer that has ended."""
_PLACE = "spec-jax/alive/"
_LEFT = "left"


class Watch:
    """Shows the peers that this process is alive, and looks for their signs of life.

    Args:
      board: where all processes write and read signs: JAX's key-value store, in process 0.
      number: this process.
      count: the number of processes.
      end: called once, with a sentence, when a peer was silent for too long.
      beat: seconds between two signs of life.
      address: host:port where process 0 listens as long as it lives; None if unknown.
    """

    def __init__(
        self,
        board: Any,
        number: int,
        count: int,
        end: Callable[[str], None],
        beat: float = _BEAT,
        address: str | None = None,
    ):
        self.board, self._number, self._count = board, number, count
        self._end, self._beat = end, beat
        self._left = threading.Event()
        self._seen: dict[int, str] = {}
        self._num_answers = 0
        # Two threads: without process 0, the one that writes and reads waits for an answer.
        self._threads = [self._run(self._show), self._run(self._look)]
        if number and address:
            self._run(self._listen, *address.rsplit(":", 1))

    def _run(self, function: Callable[..., None], *arguments: str) -> threading.Thread:
        thread = threading.Thread(
            target=function, args=arguments, name="spec-jax watch", daemon=True
        )
        thread.start()
        return thread

    def leave(self) -> None:
        """Announces that no sign of life will follow, and ends the watch."""
        self._left.set()
        for thread in self._threads:
            thread.join(timeout=self._beat)

    def _show(self) -> None:
        for beat in itertools.count():
            is_leaving = self._left.is_set()
            # Without process 0 this fails or waits; both show in the number of answers.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                sign = _LEFT if is_leaving else str(beat)
                self.board.key_value_set(f"{_PLACE}{self._number}", sign, allow_overwrite=True)
                signs = self.board.key_value_dir_get(_PLACE)
                self._seen = {int(key.rpartition("/")[2]): text for key, text in signs}
                self._num_answers += 1
            if is_leaving:
                return
            self._left.wait(self._beat)

    def _listen(self, host: str, port: str) -> None:
        """Waits until the port of process 0 is closed, which happens as soon as it dies."""
        connected = False
        while True:
            try:
                with socket.create_connection((host.strip("[]"), int(port)), _MAX_SILENT) as peer:
                    connected = True
                    peer.settimeout(None)
                    while peer.recv(1 << 12):  # JAX sends a greeting, and closes idle connections
                        pass
            except ConnectionRefusedError:
                # Refused from the beginning, it says nothing: JAX may go through a proxy.
                if connected and not self._left.is_set():
                    self._end(f"process {self._number} of {self._count} ends: process 0 has ended.")
                return
            except ConnectionResetError:
                pass
            except OSError:  # the network allows no connection but JAX's
                return

    def _look(self) -> None:
        last: dict[int, str | int | None] = {}
        silent: dict[int, int] = {}
        num_answers = 0
        while not self._left.wait(self._beat):
            # Without an answer of process 0, nothing is known of the others.
            is_answered = self._number == 0 or self._num_answers != num_answers
            num_answers, seen = self._num_answers, self._seen
            signs: dict[int, str | int | None] = {
                peer: seen.get(peer) for peer in range(self._count) if peer != self._number
            }
            if self._number and signs[0] != _LEFT:
                signs[0] = num_answers
            signs = {peer: sign for peer, sign in signs.items() if sign != _LEFT}
            for peer, sign in signs.items():
                if sign != last.get(peer):
                    silent[peer] = 0
                elif is_answered or peer == 0:
                    silent[peer] = silent.get(peer, 0) + 1
            last = signs
            lost = [str(peer) for peer in signs if silent.get(peer, 0) >= _MAX_SILENT]
            if lost:
                self._end(
                    f"process {self._number} of {self._count} ends: process {', '.join(lost)} gave "
                    f"no sign of life for {_MAX_SILENT * self._beat:g} s; it has ended, was "
                    "stopped or cannot be reached."
                )
                return


def end_process(sentence: str) -> None:
    """Ends this process at once; no other way ends a process that waits for a peer."""
    if not jax.distributed.is_initialized():  # the program has left the others on purpose
        return
    # The holder of the stream's lock may never release it.
    flush = threading.Thread(target=sys.stdout.flush, daemon=True)
    flush.start()
    flush.join(timeout=_BEAT)
    # JAX may be about to abort with a stack trace; the sentence has to be the last output.
    with contextlib.suppress(OSError, ValueError):
        stderr = sys.stderr.fileno()
        copy, nowhere = os.dup(stderr), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stderr)
        os.write(copy, printable(f"spec-jax: error: {sentence}\n").encode())
    os._exit(PEER_LOST)
