"""Rounds that the host has a say in: grammars, and drafts that go by way of text.

The device's loop is cut after each round, or within it between drafting and scoring. Whatever the
host decides is a function of the rows' tokens, so every process decides the same.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float, Int

from spec_jax.decoding.score import ancestors
from spec_jax.decoding.state import RUNNING, STOP, DecodeState
from spec_jax.drafters.given import GivenDraft
from spec_jax.grammar import Grammar, stack_masks


class HostDrafts(Protocol):
    """What drafts on the host for one batch; the drafter on the device is `Given`."""

    def propose(
        self,
        tokens: Int[np.ndarray, "batch length"],
        lengths: Int[np.ndarray, " batch"],
        limits: Int[np.ndarray, " batch"],
        threshold: Float[np.ndarray, " batch"] | None,
    ) -> tuple[Int[np.ndarray, "batch lookahead"], Int[np.ndarray, " batch"]]:
        """Each row's next draft in the target's tokens, and how many they are."""
        ...


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled pieces of a round.

    Attributes:
      put: moves arrays of one entry a row to the devices.
      to_host: copies arrays from there.
      limits: the state -> most tokens each row may draft, and its confidence threshold.
      propose: the state -> a draft, and the state.
      finish: a state, its draft, packed masks of allowed tokens -> the state after the round.
      decode: the state and a number of rounds -> the state after them.
    """

    put: Callable[[Any], Any]
    to_host: Callable[[Any], Any]
    limits: Callable[[DecodeState], tuple[Any, Any]]
    propose: Callable[[DecodeState], tuple[Any, DecodeState]]
    finish: Callable[[DecodeState, Any, Any], DecodeState]
    decode: Callable[[DecodeState, int], DecodeState]


class HostRounds:
    """Decodes a batch round by round.

    Args:
      programs: the pieces of a round.
      grammars: each row's, or None.
      drafts: what drafts on the host, if anything does.
      vocab_size: rows of the target's embedding.
    """

    def __init__(
        self,
        programs: Programs,
        grammars: Sequence[Grammar | None],
        drafts: HostDrafts | None,
        vocab_size: int,
    ):
        self._programs, self._grammars, self._drafts = programs, grammars, drafts
        self._vocab_size = vocab_size

    def advance(self, state: DecodeState, rounds: int) -> DecodeState:
        """Decodes for at most `rounds` rounds, or until all rows have finished."""
        for _ in range(rounds):
            tokens, lengths, prompts, finish = self._programs.to_host(
                (state.tokens, state.lengths, state.prompt_lengths, state.finish)
            )
            finish = finish.copy()
            for row, grammar in enumerate(self._grammars):
                if grammar is not None and finish[row] == RUNNING:
                    grammar.advance(tokens[row, prompts[row] : lengths[row]].tolist())
                    if grammar.is_finished and not grammar.masks(()).any():
                        finish[row] = STOP  # whole, and no token is there to say so
            if not (finish == RUNNING).any():
                return self._ended(state, finish)
            state = self._round(self._ended(state, finish), tokens, lengths)
        return state

    def _round(
        self,
        state: DecodeState,
        tokens: Int[np.ndarray, "batch length"],
        lengths: Int[np.ndarray, " batch"],
    ) -> DecodeState:
        programs = self._programs
        if self._drafts is not None:
            limits, threshold = programs.to_host(programs.limits(state))
            drafted = self._drafts.propose(tokens, lengths, limits, threshold)
            state = dataclasses.replace(state, drafter=GivenDraft(*programs.put(drafted)))
        if not any(self._grammars):
            return programs.decode(state, 1)
        draft, state = programs.propose(state)
        masks = self._masks(draft, len(lengths))
        return programs.finish(state, draft, programs.put(masks))

    def _masks(self, draft: Any, batch: int) -> np.ndarray:
        drafted = self._programs.to_host(draft.tokens)
        tree = ancestors(draft.lookahead, draft.drafts)[:, 1:]
        grammars = [*self._grammars, *[None] * (batch - len(self._grammars))]
        rows = [row.tolist() for row in drafted]
        return stack_masks(grammars, rows, drafted.shape[1] + 1, self._vocab_size, tree)

    def _ended(self, state: DecodeState, finish: Int[np.ndarray, " batch"]) -> DecodeState:
        return dataclasses.replace(state, finish=self._programs.put(finish))
