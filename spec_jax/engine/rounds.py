"""The compiled rounds of a batch, whole or in pieces."""

import dataclasses
from collections.abc import Callable, Hashable

import jax
import numpy as np

from spec_jax.decoding import loop
from spec_jax.decoding.state import DecodeState
from spec_jax.drafters.base import Draft, Drafter
from spec_jax.engine.batch_shape import BatchShape
from spec_jax.engine.programs import DECODE, DRAFT, LIMITS, VERIFY
from spec_jax.engine.rows import RowPrograms
from spec_jax.models.model import Model
from spec_jax.sampling.parameters import BatchSampling


@dataclasses.dataclass(frozen=True)
class Rounds:
    """The compiled rounds of a batch.

    Attributes:
      models: target and drafter, how they are used, and the compiler.
      shape: of the batch.
      sampling: the rows' parameters; they change whenever rows are inserted.
    """

    models: RowPrograms
    shape: BatchShape
    sampling: BatchSampling

    def decode(self, state: DecodeState, rounds: int, min_running: int = 1) -> DecodeState:
        """At most `rounds` rounds on the device, while at least `min_running` rows run."""

        def function(target: Model, drafter: Drafter, state, sampling, *limits) -> DecodeState:
            return loop.decode(target, drafter, self.models.strategy, state, sampling, *limits)

        limits = np.int32(rounds), np.int32(min_running)
        args = (self.models.target, self.models.drafter, state, self.sampling, *limits)
        return self._program(DECODE, function, args, donate=2, like=state)(*args)

    def limits(self, state: DecodeState) -> tuple[jax.Array, jax.Array | None]:
        """Most tokens that each row may draft next, and its confidence threshold."""

        def function(state: DecodeState):
            return loop.limits(self.models.strategy.draft_length, state)

        return self._program(LIMITS, function, (state,))(state)

    def propose(self, state: DecodeState) -> tuple[Draft, DecodeState]:
        """The drafting of a round."""

        def function(drafter: Drafter, state: DecodeState, sampling: BatchSampling):
            return loop.propose(drafter, self.models.strategy, state, sampling)

        args = (self.models.drafter, state, self.sampling)
        return self._program(DRAFT, function, args, donate=1)(*args)

    def finish(
        self, state: DecodeState, draft: Draft, allowed: np.ndarray | None = None
    ) -> DecodeState:
        """The rest of a round; `allowed` are packed sets of tokens for each position, or None."""

        def function(target: Model, drafter: Drafter, state, draft, sampling, allowed):
            return loop.finish_round(
                target, drafter, self.models.strategy, state, draft, sampling, allowed
            )

        masks = self.models.compiler.put(allowed)
        args = (self.models.target, self.models.drafter, state, draft, self.sampling, masks)
        masked = allowed is not None
        return self._program(VERIFY, function, args, donate=2, like=state, more=masked)(*args)

    def _program(
        self,
        name: str,
        function: Callable,
        args: tuple,
        donate: int | None = None,
        like: object = None,
        more: Hashable = None,
    ) -> Callable:
        key = (name, (self.shape.of_rounds, more))
        donated = () if donate is None else (donate,)
        return self.models.compiler.program(key, function, args, donate=donated, like=like)
