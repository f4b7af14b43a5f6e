"""Decodes requests with an engine: all at once, or inserted into a running batch."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from spec_jax.config import SamplingParams
from spec_jax.decoding.draft_length import Constant
from spec_jax.drafters.none import NoDraft
from spec_jax.engine.batch import Batch
from spec_jax.engine.engine import Engine
from spec_jax.engine.requests import Request, RequestInput

T = TypeVar("T")
BATCH = 3
"""Rows of the larger batches."""


def make_request(
    start: RequestInput,
    params: SamplingParams,
    *,
    key: Sequence[int] | np.ndarray = (0, 0),
    stops: Sequence[int] = (),
) -> Request:
    """A request for the engine; it ends at `max_tokens` or a stop token."""
    return Request(
        prompt_token_ids=start.prompt_token_ids,
        sampling=params,
        key=np.array(key, np.uint32),
        stop_token_ids=tuple(stops),
        max_length=len(start) + params.token_limit,
        source=start.source,
    )


def drafts(engine: Engine) -> bool:
    """Whether the method proposes tokens at all."""
    return engine.drafter.lookahead > 0 and not isinstance(engine.drafter, NoDraft)


def plain_engine(engine: Engine, on_progress: Callable[[str], None] | None = None) -> Engine:
    """Plain decoding with an engine's target; scoring is consistent if the engine's is."""
    consistent = engine.strategy.consistent
    width = engine.drafter.lookahead if consistent else 0
    return Engine(
        engine.target,
        NoDraft(width),
        Constant(width),
        scoring_consistent=consistent,
        max_model_len=engine.max_model_len,
        on_progress=on_progress,
    )


def start_of(request: Request) -> RequestInput:
    """What a request starts from."""
    return RequestInput(list(request.prompt_token_ids), request.source)


def decode(
    engine: Engine, requests: Sequence[Request], room_for: Sequence[Request] | None = None
) -> tuple[list[list[int]], Batch]:
    """The generated tokens of each request, one row each.

    The batch is made for the requests `room_for`, the same number; for these by default.
    """
    batch = engine.open(room_for or requests, len(requests))
    batch.insert(dict(enumerate(requests)))
    while batch.running:
        batch.advance(1 << 20)
    return generated(batch, requests), batch


def generated(batch: Batch, requests: Sequence[Request]) -> list[list[int]]:
    """The tokens that each row of a batch has gained so far."""
    tokens, lengths = batch.view.tokens, batch.view.lengths
    return [
        tokens[i, len(each.prompt_token_ids) : lengths[i]].tolist()
        for i, each in enumerate(requests)
    ]


def in_groups(items: list) -> list[list]:
    """Groups of `BATCH`, the last filled up from the start."""
    short = -len(items) % BATCH
    filled = [*items, *(items * BATCH)[:short]]
    return [filled[i : i + BATCH] for i in range(0, len(filled), BATCH)]


def in_batches(
    requests: Sequence[Request], play: Callable[[list[Request]], Iterable[T]]
) -> list[T]:
    """What `play` gives for each request; it gets groups of `BATCH`."""
    groups = in_groups(list(requests))
    return [result for group in groups for result in play(group)][: len(requests)]


def drive(
    engine: Engine,
    requests: Sequence[Request],
    rows: int,
    choose: Callable[[int, int], int],
    room_for: Sequence[Request] | None = None,
) -> list[tuple[list[int], int]]:
    """Decodes requests that enter a batch of `rows` slots as with `LLM`, at chosen times and slots.

    `choose` returns a number from its first argument to its second, and the batch is made for the
    requests `room_for`, by default for these. Returns each request's tokens, and why it ended.
    """
    batch = engine.open(room_for or requests, rows)
    waiting, running = list(requests), {}
    results: dict[int, tuple[list[int], int]] = {}
    slots = batch.slots(rows)
    while waiting or running:
        free = [slot for slot in slots if slot not in running]
        most, entering = min(len(free), len(waiting)), {}
        for _ in range(choose(0 if running else 1, most) if most else 0):
            slot = free.pop(choose(0, len(free) - 1))
            entering[slot] = waiting.pop(choose(0, len(waiting) - 1))
        if entering:
            batch.insert(entering)
            running.update(entering)
        batch.advance(choose(1, 5), choose(1, len(running)))
        view = batch.view
        for slot in [slot for slot in running if view.finish[slot]]:
            each = running.pop(slot)
            text = view.tokens[slot, len(each.prompt_token_ids) : view.lengths[slot]].tolist()
            results[id(each)] = text, int(view.finish[slot])
    return [results[id(each)] for each in requests]
