"""The host's copy of a batch, and the seconds of its requests."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from spec_jax.decoding.logprobs import Logprobs
from spec_jax.decoding.state import Counters


class Work(NamedTuple):
    """The totals of one request's rounds, in the order of `SpeculativeMetrics`."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()


class Seconds(NamedTuple):
    """Wall time of prefill, of rounds, and of compilation, which neither of them includes.

    In the order of `SpeculativeMetrics`.
    """

    prefill: float = 0.0
    decode: float = 0.0
    compile: float = 0.0


@dataclasses.dataclass(frozen=True)
class View:
    """The host's copy of the parts of a state that requests need, as NumPy arrays.

    Attributes:
      tokens: int32 [batch, length], prompt and output.
      lengths: int32 [batch].
      finish: int32 [batch], RUNNING or why the row ended.
      counters: counters of the rounds.
      logprobs: of generated tokens, or None.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    finish: np.ndarray
    counters: Counters
    logprobs: Logprobs | None

    def work(self, slot: int) -> Work:
        """The totals of a row's rounds."""
        counters: Any = self.counters
        return Work(
            rounds=int(counters.rounds[slot]),
            drafted=int(counters.drafted[slot]),
            accepted=int(counters.accepted[slot]),
            accepted_per_position=tuple(counters.accepted_per_position[slot].tolist()),
        )

    def plain_rounds(self, slot: int, begin: int, end: int) -> int:
        """Rounds without a draft that emitted a row's tokens `begin` to `end`."""
        return int((np.asarray(self.counters.drafted_at)[slot, begin:end] == 1).sum())

    def drafted(self, slot: int, prompt: int, begin: int, end: int) -> list[bool]:
        """For tokens `begin` to `end` of a row, whether a draft had proposed each of them.

        A round emits the drafted tokens that it accepts, and then one of the target's, unless it
        ends before that. `prompt` is the length of the prompt.
        """
        log = np.asarray(self.counters.drafted_at)[slot, prompt : self.lengths[slot]]
        starts, accepted = np.flatnonzero(log), int(self.counters.accepted[slot])
        of_draft = np.ones(len(log), np.bool_)
        of_draft[starts[1:] - 1] = False
        if len(log):
            of_draft[-1] = of_draft[:-1].sum() < accepted
        return of_draft[begin - prompt : end - prompt].tolist()

    def work_until(self, slot: int, begin: int, end: int) -> Work:
        """The totals of a row's rounds if token `end - 1` was a stop that only the host saw.

        They are counted like rounds before a stop token on the device: without later rounds and
        without tokens drafted past it. `begin` is the length of the prompt.
        """
        total, lookahead = self.work(slot), self.counters.accepted_per_position.shape[1]
        log = np.asarray(self.counters.drafted_at)[slot, begin : self.lengths[slot]]
        starts, end = np.flatnonzero(log), end - begin
        emitted = np.diff(starts, append=len(log))
        accepted = emitted - 1
        accepted[-1] = total.accepted - accepted[:-1].sum()
        seen = np.minimum(emitted, end - starts)[starts < end]
        counted = np.minimum(accepted[: len(seen)], seen)
        drafted = log[starts][: len(seen)] - 1
        drafted[-1] = min(drafted[-1], seen[-1])
        per_position = (np.arange(lookahead)[None] < counted[:, None]).sum(0)
        return Work(len(seen), int(drafted.sum()), int(counted.sum()), tuple(per_position.tolist()))
