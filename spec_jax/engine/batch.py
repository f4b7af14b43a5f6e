"""A batch that is being decoded, as the host sees it."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from spec_jax import distributed
from spec_jax.decoding.state import RUNNING, STOP, DecodeState


@dataclasses.dataclass(frozen=True)
class View:
    """The host's copy of what requests want to know of a state; arrays are NumPy's.

    Attributes:
      tokens: int32 [batch, length], prompt and output.
      lengths: int32 [batch].
      finish: int32 [batch], RUNNING or why the row ended.
      counters: what the rounds did.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    finish: np.ndarray
    counters: Any


@dataclasses.dataclass
class Batch:
    """A batch being decoded, and what the host last saw of it.

    Attributes:
      size: requests; rows past it are padding.
      state: the device's state; replaced, never shared, since its buffers are donated.
      prefill_seconds: reading the prompts.
      compile_seconds: compilation this batch had to wait for.
      decode_seconds: all rounds so far.
    """

    size: int
    state: DecodeState
    _advance: Callable[[DecodeState, int], DecodeState]
    _compile_clock: Callable[[], float]
    prefill_seconds: float
    compile_seconds: float
    decode_seconds: float = 0.0
    _view: View | None = None

    def advance(self, max_rounds: int) -> None:
        """Decodes for at most `max_rounds` rounds, or until all rows have finished."""
        begin, compiled = time.perf_counter(), self._compile_clock()
        self.state = jax.block_until_ready(self._advance(self.state, max_rounds))
        compiled = self._compile_clock() - compiled
        self.decode_seconds += time.perf_counter() - begin - compiled
        self.compile_seconds += compiled
        self._view = None

    def stop(self, rows: Sequence[int]) -> None:
        """Ends rows whose stop string the host has found."""
        finish = self.view.finish.copy()
        finish[list(rows)] = STOP
        sharding = self.state.finish.sharding
        ended = jax.make_array_from_callback(finish.shape, sharding, lambda part: finish[part])
        self.state = dataclasses.replace(self.state, finish=ended)
        self._view = None

    @property
    def view(self) -> View:
        """The state as it is now, copied to the host at the first look."""
        if self._view is None:
            state = self.state
            seen = (state.tokens, state.lengths, state.finish, state.counters)
            self._view = View(*distributed.to_host(seen))
        return self._view

    @property
    def running(self) -> bool:
        """Whether any row still decodes."""
        return bool((self.view.finish == RUNNING).any())
