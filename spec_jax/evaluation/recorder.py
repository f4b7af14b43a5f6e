"""Records a method round by round: its drafts, their q, and how many tokens were accepted."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from spec_jax import distributed
from spec_jax.drafters.base import Draft
from spec_jax.engine.engine import Engine
from spec_jax.engine.requests import Request


class Drafted(NamedTuple):
    """The drafts of each row, as they were proposed; see `drafters.base.Draft`."""

    tokens: Int[np.ndarray, "batch drafted"]
    probs: Float[np.ndarray, "batch drafted vocab"] | None
    lengths: Int[np.ndarray, " batch"]
    num_drafts: int


def drafted(draft: Draft, size: int) -> Drafted:
    """The host's copy of the first rows' drafts."""
    parts = (draft.tokens, draft.probs, draft.lengths, draft.is_certain)
    tokens, probs, lengths, is_certain = distributed.to_host(parts)
    if probs is not None and is_certain is not None:
        one_hot = tokens[..., None] == np.arange(probs.shape[-1])
        probs = np.where(is_certain[..., None], one_hot, probs).astype(probs.dtype)
    probs = None if probs is None else probs[:size]
    return Drafted(tokens[:size], probs, lengths[:size], draft.num_drafts)


@dataclasses.dataclass(frozen=True)
class Round:
    """The result of one round for each row; all zeros for a row that had finished.

    `start` is the length of the row before, and `emitted` the number of tokens that it gained.
    """

    start: Int[np.ndarray, " batch"]
    emitted: Int[np.ndarray, " batch"]
    accepted: Int[np.ndarray, " batch"]
    draft: Drafted


def play(
    engine: Engine, requests: Sequence[Request]
) -> tuple[Int[np.ndarray, "batch length"], list[Round]]:
    """Decodes requests without stop tokens round by round; returns all tokens, and the rounds."""
    drafts: list[Drafted] = []
    size, rounds = len(requests), []
    batch = engine.start(requests)
    while batch.running:
        before = batch.view
        batch.advance(1, on_draft=lambda draft: drafts.append(drafted(draft, size)))
        after = batch.view
        emitted = after.lengths - before.lengths
        accepted = np.asarray(after.counters.accepted) - np.asarray(before.counters.accepted)
        rounds.append(Round(before.lengths[:size], emitted[:size], accepted[:size], drafts.pop()))
    return batch.view.tokens[:size], rounds
