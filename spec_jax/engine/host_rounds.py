"""Rounds that need the host: grammars, and drafts that are translated as text.

The device's loop is interrupted after each round, or between drafting and scoring. The host's
decisions are functions of the rows' tokens, so every process decides the same.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Int

from spec_jax import distributed
from spec_jax.decoding.score import drafted_before
from spec_jax.decoding.state import RUNNING, STOP, DecodeState
from spec_jax.drafters.base import Draft
from spec_jax.drafters.host_draft import HostTokens
from spec_jax.engine.rounds import Rounds
from spec_jax.engine.universal_text import UniversalText
from spec_jax.text.grammar import Grammar, stack_masks


class HostRounds:
    """Decodes a batch round by round.

    Args:
      rounds: the compiled pieces of a round.
      grammars: each row's, or None.
      drafts: drafts on the host, if the method does.
      on_draft: called with each round's draft before it is verified.
    """

    def __init__(
        self,
        rounds: Rounds,
        grammars: Sequence[Grammar | None],
        drafts: UniversalText | None,
        on_draft: Callable[[Draft], None] | None = None,
    ):
        self._rounds, self._grammars, self._drafts = rounds, grammars, drafts
        self._on_draft = on_draft
        self._put = rounds.models.compiler.put

    def advance(self, state: DecodeState, rounds: int, min_running: int = 1) -> DecodeState:
        """Decodes at most `rounds` rounds, and none with less than `min_running` rows."""
        for _ in range(rounds):
            tokens, lengths, prompts, finish = distributed.to_host(
                (state.tokens, state.lengths, state.prompt_lengths, state.finish)
            )
            finish = finish.copy()
            for row, grammar in enumerate(self._grammars):
                if grammar is not None and finish[row] == RUNNING:
                    grammar.advance(tokens[row, prompts[row] : lengths[row]].tolist())
                    if grammar.is_finished and not grammar.masks(()).any():
                        finish[row] = STOP  # the output is complete, without a stop token
            if (finish == RUNNING).sum() < min_running:
                return self._ended(state, finish)
            state = self._round(self._ended(state, finish), tokens, lengths)
        return state

    def _round(
        self,
        state: DecodeState,
        tokens: Int[np.ndarray, "batch length"],
        lengths: Int[np.ndarray, " batch"],
    ) -> DecodeState:
        rounds = self._rounds
        if self._drafts is not None:
            with jax.profiler.TraceAnnotation("propose"):  # as the loop on the device names it
                limits, threshold = distributed.to_host(rounds.limits(state))
                drafted = self._drafts.propose(tokens, lengths, limits, threshold)
                state = dataclasses.replace(state, drafter=HostTokens(*self._put(drafted)))
        if self._on_draft is None and not any(self._grammars):
            return rounds.decode(state, 1)
        draft, state = rounds.propose(state)
        if self._on_draft is not None:
            self._on_draft(draft)
        masks = self._masks(draft) if any(self._grammars) else None
        return rounds.finish(state, draft, masks)

    def _masks(self, draft: Draft) -> np.ndarray:
        drafted, lengths = distributed.to_host((draft.tokens, draft.lengths))
        tree = drafted_before(draft.lookahead, draft.num_drafts)
        proposed = [
            row[: length * draft.num_drafts].tolist()
            for row, length in zip(drafted, lengths, strict=True)
        ]
        vocab_size = self._rounds.models.compiler.vocab_size
        return stack_masks(self._grammars, proposed, drafted.shape[1] + 1, vocab_size, tree)

    def _ended(self, state: DecodeState, finish: Int[np.ndarray, " batch"]) -> DecodeState:
        return dataclasses.replace(state, finish=self._put(finish))
