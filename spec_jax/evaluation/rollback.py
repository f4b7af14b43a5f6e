"""Checks that a drafter's state holds its row's tokens, and nothing of rejected ones."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from spec_jax.config import SamplingParams
from spec_jax.engine.engine import Engine
from spec_jax.engine.requests import Request, RequestInput
from spec_jax.evaluation.decoding import make_request
from spec_jax.evaluation.recorder import Drafted, drafted, play
from spec_jax.evaluation.verdict import Check

ROWS = 16
"""Rows whose rounds are compared; each round's draft is made again in a new row."""
TOLERANCE = 1e-3
"""How far rounding may move a probability: a prompt is read in other blocks than a text grows."""


def check_rollback(
    engine: Engine,
    prompts: Sequence[RequestInput],
    *,
    max_tokens: int,
    seed: int,
    on_progress: Callable[[str], None],
) -> Check:
    """Compares drafts after rejected tokens with drafts of rows that begin with the same text.

    Both have the same random numbers, which depend on a row's key and length alone.
    """
    on_progress("drafting the same again")
    check = Check("drafted: by the text alone")
    params = SamplingParams(temperature=1.0, max_tokens=max_tokens)
    rows = [make_request(prompts[i % len(prompts)], params, key=(seed, i)) for i in range(ROWS)]
    tokens, rounds = play(engine, rows)
    rejected = np.zeros(ROWS, bool)
    for played in rounds:
        draft = played.draft
        looked = np.flatnonzero(rejected & (played.emitted > 0) & (draft.lengths > 0)).tolist()
        if looked:
            again = _drafted_anew(engine, rows, tokens, played.start)
            for row in looked:
                check.compare(
                    _same(draft, again, row, engine.strategy.draft_length.varies),
                    "after rejected tokens a row's draft is not the one that its text has from the "
                    "start: `commit` does not roll the drafter's state back, or loses tokens.",
                )
        rejected |= (played.emitted > 0) & (played.accepted < draft.lengths)
    check.sample = f"{check.comparisons} drafts after rejected tokens"
    if not check.comparisons:
        check.leave_out("no draft followed a rejected one")
    return check


def _drafted_anew(
    engine: Engine, rows: Sequence[Request], tokens: np.ndarray, lengths: np.ndarray
) -> Drafted:
    """The drafts of rows whose prompts are the first `lengths` of the tokens."""
    anew = [
        dataclasses.replace(
            each,
            prompt_token_ids=tokens[row, : lengths[row]].tolist(),
            max_length=max(each.max_length, int(lengths[row]) + 1),
        )
        for row, each in enumerate(rows)
    ]
    drafts: list[Drafted] = []
    batch = engine.start(anew)
    batch.advance(1, on_draft=lambda draft: drafts.append(drafted(draft, len(anew))))
    return drafts[0]


def _same(one: Drafted, other: Drafted, row: int, varies: bool) -> bool:
    """Whether two drafts of a row agree; as far as both go, if a policy chooses their lengths."""
    count = int(min(one.lengths[row], other.lengths[row])) * one.num_drafts
    if not varies and one.lengths[row] != other.lengths[row]:
        return False
    if not np.array_equal(one.tokens[row, :count], other.tokens[row, :count]):
        return False
    if one.probs is None or other.probs is None:
        return one.probs is other.probs
    difference = np.abs(one.probs[row, :count] - other.probs[row, :count])
    return bool((difference < TOLERANCE).all())
