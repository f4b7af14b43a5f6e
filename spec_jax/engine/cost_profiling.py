"""The host's side of adaptive draft lengths: measured costs of rounds, remembered acceptances."""

import dataclasses
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np

from spec_jax import distributed
from spec_jax.decoding.adaptive import Adaptive, AdaptiveState
from spec_jax.decoding.state import RUNNING, DecodeState

Advance = Callable[[DecodeState, int, int], DecodeState]
"""Decodes a state for at most a number of rounds, while a minimum number of rows run."""

ROUNDS_EACH = 3
"""Rounds that are timed for each choice of K; the fastest counts."""


class CostProfiler:
    """Gives an `Adaptive` policy its costs and the acceptances of earlier requests.

    Costs are measured once for each compiled loop, in the first rounds that it decodes: their
    tokens count like any others. Several processes use the times of process 0.

    Args:
      policy: whose state to fill in.
    """

    def __init__(self, policy: Adaptive):
        self.policy = policy
        self.costs: dict[Hashable, np.ndarray] = {}
        """Seconds of a round, for each of the policy's choices, by compiled loop."""
        self._samples: dict[Hashable, list[float]] = {}
        self._patience = policy.first_patience
        self.judged = policy.prior_tokens
        """Drafted tokens that finished requests were judged by; older ones count less."""
        self._accepted = policy.prior_rate * policy.prior_tokens

    def begin(self, key: Hashable, state: DecodeState) -> DecodeState:
        """The state of new rows, which start from the statistics of earlier ones."""
        rate = self._accepted / self.judged
        shape = state.finish.shape
        changes = {
            "accepted": np.full(shape, rate * self.policy.prior_tokens, np.float32),
            "patience": np.full(shape, self._patience, np.int32),
        }
        return self.with_costs(key, _with(state, changes))

    def with_costs(self, key: Hashable, state: DecodeState) -> DecodeState:
        """The state with the costs that are known for a compiled loop, if they are."""
        if key not in self.costs:
            return state
        return _with(state, {"costs": self.costs[key].astype(np.float32)})

    def advance(
        self, key: Hashable, state: DecodeState, rounds: int, min_running: int, advance: Advance
    ) -> DecodeState:
        """Decodes; first measures costs that are still unknown for the compiled loop."""
        if key not in self.costs:
            state = self._measure(key, state, min_running, advance)
        return advance(state, rounds, min_running)

    def _measure(
        self, key: Hashable, state: DecodeState, min_running: int, advance: Advance
    ) -> DecodeState:
        """Times rounds of each K in turn, as long as a row can still draft that many tokens."""
        choices = self.policy.choices
        samples = self._samples.setdefault(key, [])
        # The first turn warms up, and lets a drafter read tokens that it has not read yet.
        while len(samples) < (ROUNDS_EACH + 1) * len(choices):
            choice = choices[len(samples) % len(choices)]
            finish, room = distributed.to_host((state.finish, state.max_lengths - state.lengths))
            running = finish == RUNNING
            if running.sum() < min_running or not (running & (room > choice)).any():
                return _with(state, {"forced": np.int32(-1)})
            state = _with(state, {"forced": np.int32(choice)})
            jax.block_until_ready(state.draft_length.forced)
            begin = time.perf_counter()
            state = jax.block_until_ready(advance(state, 1, min_running))
            samples.append(time.perf_counter() - begin)
        quickest = np.reshape(samples, (-1, len(choices)))[1:].min(0)
        self.costs[key] = np.array(distributed.from_first(quickest.tolist))
        return _with(state, {"forced": np.int32(-1), "costs": self.costs[key].astype(np.float32)})

    def record(self, state: DecodeState, rows: Sequence[int]) -> None:
        """Records the acceptances of finished rows; earlier rows count less."""
        adaptive: AdaptiveState = state.draft_length
        accepted, judged, patience, rounds = distributed.to_host(
            (adaptive.accepted, adaptive.judged, adaptive.patience, state.counters.rounds)
        )
        used = [row for row in rows if rounds[row] > 0]
        if used:
            self._accepted = 0.5 * self._accepted + float(accepted[used].mean())
            self.judged = 0.5 * self.judged + float(judged[used].mean())
            # Not with full weight: the next text may be of another kind.
            self._patience = min(int(patience[used].min()), self.policy.most_inherited_patience)


def _with(state: DecodeState, changes: dict[str, Any]) -> DecodeState:
    """The state with some arrays of its draft-length policy replaced; shardings are kept."""
    arrays = {}
    for name, value in changes.items():
        old: jax.Array = getattr(state.draft_length, name)
        value = np.asarray(value).reshape(old.shape)
        arrays[name] = jax.make_array_from_callback(
            old.shape, old.sharding, lambda part, value=value: value[part]
        )
    return dataclasses.replace(
        state, draft_length=dataclasses.replace(state.draft_length, **arrays)
    )
