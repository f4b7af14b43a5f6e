"""The slots of a batch as the host knows them, and the prompts that are being read for them."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from spec_jax.engine.batch_shape import BatchShape
from spec_jax.engine.requests import Request
from spec_jax.engine.rows import DeviceRows
from spec_jax.engine.view import Seconds

NO_TEXT, NO_SECONDS = np.zeros((0,), np.int32), Seconds()


@dataclasses.dataclass
class Slot:
    """What the host knows of a slot: all of its last request, until another one takes it.

    Attributes:
      request: None if none has taken the slot.
      entry: a count of the requests that took slots before; 0 if none has taken this one.
      began: the batch's times when the row was inserted; of prefill, the row's share.
      text: the token ids that the slot's cache holds, and one more; empty while a prompt is read.
      num_cached_tokens: tokens of the prompt that were copied from a slot.
      num_computed_tokens: tokens that the cache holds, while a prompt is read.
    """

    request: Request | None = None
    entry: int = 0
    began: Seconds = NO_SECONDS
    text: Int[np.ndarray, " tokens"] = dataclasses.field(default_factory=lambda: NO_TEXT)
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0

    def num_shared(self, prompt: Sequence[int], block: int | None) -> int:
        """How many tokens of a prompt the slot has computed.

        Args:
          prompt: the prompt.
          block: what the number is a multiple of; None if the cache cannot be cut, so that all of
            it counts or nothing.
        """
        size = min(len(self.text), len(prompt))
        if not size:
            return 0
        differs = self.text[:size] != np.asarray(prompt[:size])
        num_equal = int(differs.argmax()) if differs.any() else size
        # One token more must be equal, and the last two of a prompt are always read.
        shared = max(0, min(num_equal - 1, len(prompt) - 2))
        if block is None:
            return shared if shared == len(self.text) - 1 else 0
        return shared // block * block


@dataclasses.dataclass
class Prefill:
    """Rows whose prompts are being read, apart from the batch that they will enter.

    Attributes:
      group: the slot of each row, or None for padding.
      requests: the request of each row.
      shape: in which the prompts are read.
      rows: the rows; None before anything is read.
      num_chunks: blocks that are left to read.
      seconds: what reading took so far.
    """

    group: list[int | None]
    requests: list[Request]
    shape: BatchShape
    rows: DeviceRows | None = None
    num_chunks: int = 0
    seconds: float = 0.0
