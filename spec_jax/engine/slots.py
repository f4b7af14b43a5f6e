"""The slots of a batch as the host knows them."""

import dataclasses

import numpy as np
from jaxtyping import Int

from spec_jax.engine.requests import Request
from spec_jax.engine.view import Seconds

NO_TEXT, NO_SECONDS = np.zeros((0,), np.int32), Seconds()


@dataclasses.dataclass
class Slot:
    """What the host knows of a slot: all of its last request, until another one takes it.

    Attributes:
      request: None if none has taken the slot.
      entry: a count of the requests that took slots before; 0 if none has taken this one.
      began: the batch's times when the row was inserted; of prefill, the row's share.
      text: the token ids that the slot's cache holds, and one more.
      num_cached_tokens: tokens of the prompt that were copied from a slot.
    """

    request: Request | None = None
    entry: int = 0
    began: Seconds = NO_SECONDS
    text: Int[np.ndarray, " tokens"] = dataclasses.field(default_factory=lambda: NO_TEXT)
    num_cached_tokens: int = 0
    _num_equal: dict[Request, int] = dataclasses.field(default_factory=dict)

    def hold(self, text: Int[np.ndarray, " tokens"] = NO_TEXT) -> None:
        """Sets the text."""
        self.text, self._num_equal = text, {}

    def num_shared(self, request: Request, block: int | None) -> int:
        """How many tokens of a request's prompt the slot has computed.

        Args:
          request: whose prompt is compared with the text, once.
          block: what the number is a multiple of; None if the cache cannot be cut, so that all of
            it counts or nothing.
        """
        if not len(self.text):
            return 0
        if request not in self._num_equal:
            size = min(len(self.text), len(request.prompt_token_ids))
            differs = self.text[:size] != np.asarray(request.prompt_token_ids[:size])
            self._num_equal[request] = int(differs.argmax()) if differs.any() else size
        # One token more must be equal, and the last two of a prompt are always read.
        shared = min(self._num_equal[request] - 1, len(request.prompt_token_ids) - 2)
        if block is None:
            return max(0, shared) if shared == len(self.text) - 1 else 0
        return max(0, shared) // block * block
