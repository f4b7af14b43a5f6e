"""Messages of process 0 to all others, through JAX's key-value store.

They cost no step of a device, and a process may wait for the next one as long as it takes.
"""

import itertools
import json
from typing import Any

import jax

_PLACE = "spec-jax/messages/"
_READ_EVERY = 256
"""Messages after which a process says how far it has read, so that they can be deleted."""
_WAIT_MS = 60_000
"""Between two questions for the next message, where none comes."""


class Messages:
    """Messages in their order; process 0 sends, each other process receives.

    Args:
      board: JAX's key-value store.
      number: this process.
      count: the number of processes.
    """

    def __init__(self, board: Any, number: int, count: int):
        self._board, self._number, self._count = board, number, count
        self._place = itertools.count()
        self._num_deleted = 0

    def send(self, message: Any) -> None:
        """Sends what JSON can hold."""
        at = next(self._place)
        self._board.key_value_set(f"{_PLACE}{at}", json.dumps(message))
        if at % _READ_EVERY == _READ_EVERY - 1:
            self._delete()

    def receive(self) -> Any:
        """Waits for the next message; `Watch` ends a process that waits for a dead one."""
        at = next(self._place)
        key = f"{_PLACE}{at}"
        while True:
            try:
                text = self._board.blocking_key_value_get(key, _WAIT_MS)
                break
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
        if at % _READ_EVERY == _READ_EVERY - 1:
            done = f"{_PLACE}read/{self._number}"
            self._board.key_value_set(done, str(at + 1), allow_overwrite=True)
        return json.loads(text)

    def _delete(self) -> None:
        """Deletes what all processes have read."""
        read = dict(self._board.key_value_dir_get(f"{_PLACE}read/"))
        if len(read) < self._count - 1:
            return
        first, self._num_deleted = self._num_deleted, min(map(int, read.values()))
        for at in range(first, self._num_deleted):
            self._board.key_value_delete(f"{_PLACE}{at}")
