"""Watches a method round by round: what was drafted, with which q, and what became of it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from spec_jax import distributed
from spec_jax.config import SamplingParams
from spec_jax.decoding.sampling import BatchSampling
from spec_jax.drafters.base import Context, Draft
from spec_jax.engine import Engine, Request
from spec_jax.pytree import pytree, static


@pytree
class Recorder:
    """A drafter that keeps its latest draft in its state, where the host can read it.

    Attributes:
      drafter: the one that drafts.
      vocab_size: of the target.
    """

    drafter: Any
    vocab_size: int = static()

    @property
    def lookahead(self) -> int:
        """The drafter's."""
        return self.drafter.lookahead

    def init(self, tokens: Int[Array, "batch length"], lengths: Int[Array, " batch"], block: int):
        """The drafter's state, and an empty draft of the right shape."""
        state = self.drafter.init(tokens, lengths, block)
        plain = [SamplingParams(max_tokens=1)] * tokens.shape[0]
        context = Context(
            tokens=tokens,
            lengths=lengths,
            prompt_lengths=lengths,
            keys=jax.random.split(jax.random.key(0), tokens.shape[0]),
            sampling=BatchSampling.stack(plain, self.vocab_size),
        )
        draft, _ = jax.eval_shape(self.drafter.propose, state, context)
        return state, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), draft)

    def propose(self, state: tuple[Any, Draft], context: Context):
        """The drafter's draft."""
        draft, inner = self.drafter.propose(state[0], context)
        return draft, (inner, draft)

    def commit(self, state: tuple[Any, Draft], lengths: Int[Array, " batch"]):
        """The drafter's own; the draft stays."""
        return self.drafter.commit(state[0], lengths), state[1]


def recording(engine: Engine, on_progress: Callable[[str], None]) -> Engine:
    """An engine that does the same and lets its drafts be read."""
    return Engine(
        engine.target,
        Recorder(engine.drafter, engine.target.config.vocab_size),
        engine.lookahead,
        engine.verification,
        max_model_len=engine.max_model_len,
        on_progress=on_progress,
    )


class Drafted(NamedTuple):
    """One draft a row, as it was proposed; see `drafters.base.Draft`."""

    tokens: Int[np.ndarray, "batch lookahead"]
    probs: Float[np.ndarray, "batch lookahead vocab"] | None
    lengths: Int[np.ndarray, " batch"]


def drafted(draft: Draft, size: int) -> Drafted | None:
    """The host's copy of the first rows' draft; None if it holds several drafts a row."""
    if draft.tokens.ndim != 2:
        return None
    tokens, probs, lengths = distributed.to_host((draft.tokens, draft.probs, draft.lengths))
    return Drafted(tokens[:size], None if probs is None else probs[:size], lengths[:size])


@dataclasses.dataclass(frozen=True)
class Round:
    """What one round did to each row; all zeros for a row that had finished.

    Attributes:
      start: how long the row was.
      emitted: tokens it gained.
      allowed: how many drafted tokens were verified.
      accepted: how many of them were accepted.
      draft: what was proposed.
    """

    start: Int[np.ndarray, " batch"]
    emitted: Int[np.ndarray, " batch"]
    allowed: Int[np.ndarray, " batch"]
    accepted: Int[np.ndarray, " batch"]
    draft: Drafted | None


def play(
    engine: Engine, requests: Sequence[Request]
) -> tuple[Int[np.ndarray, "batch length"], list[Round]]:
    """Decodes requests round by round; returns all tokens, and the rounds.

    Args:
      engine: from `recording`.
      requests: none of them with a stop token.
    """
    batch = engine.start(requests)
    rounds, size = [], batch.size
    while batch.running:
        before = batch.view
        batch.advance(1)
        after = batch.view
        gained = (
            after.lengths - before.lengths,
            after.counters.drafted - before.counters.drafted,
            after.counters.accepted - before.counters.accepted,
        )
        emitted, allowed, accepted = (each[:size] for each in gained)
        draft = drafted(batch.state.drafter[1], size)
        rounds.append(Round(before.lengths[:size], emitted, allowed, accepted, draft))
    return batch.view.tokens[:size], rounds
