"""The prompts that an audit comes with, and which of them show most of a method."""

from collections.abc import Callable, Sequence

import numpy as np

from spec_jax.config import SamplingParams
from spec_jax.engine.engine import Engine
from spec_jax.engine.requests import RequestInput
from spec_jax.evaluation.decoding import BATCH, decode, in_groups, make_request
from spec_jax.evaluation.sampler import width_of

PROMPTS = (
    "The capital of France is",
    "one two three four five one two three four five one two three",
    "def mean(xs):\n    total = 0\n    for x in xs:\n        total += x\n    return",
    "red, blue, red, blue, red, blue, red,",
    "Monday: rain.\nTuesday: rain.\nWednesday: rain.\nThursday:",
    "What do you want? What do you say? What do you",
)
"""Prompts of different kinds; most repeat themselves, so that lookups find matches."""


def room_needed(engine: Engine, max_tokens: int) -> int:
    """Tokens that an audit needs after a prompt: a completion, a neighbour's text, two rounds."""
    return max(2 * max_tokens, width_of(engine))


def choose(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    on_progress: Callable[[str], None],
) -> list[RequestInput]:
    """Three prompts: with most accepted, most rejected and most drafted tokens.

    So a stop token can stand inside an accepted block, and tokens follow a rejected one. Prompts
    that leave too little room in the context are not taken if there are others.
    """
    on_progress("choosing prompts")
    starts = [RequestInput.of(engine.target.config, prompt) for prompt in prompts]
    room = engine.max_model_len - room_needed(engine, max_tokens)
    starts = [start for start in starts if len(start) <= room] or starts[:1]
    if len(starts) <= BATCH:
        return starts
    params = SamplingParams(max_tokens=max_tokens)
    accepted, drafted = np.zeros((2, len(starts)), np.int64)
    for group in in_groups(list(range(len(starts)))):
        counters = decode(engine, [make_request(starts[i], params) for i in group])[1].view.counters
        accepted[group] = counters.accepted[: len(group)]
        drafted[group] = counters.drafted[: len(group)]
    chosen: list[int] = []
    for measure in (accepted, drafted - accepted, drafted):
        order = np.argsort(-measure, kind="stable").tolist()
        chosen.append(next(i for i in order if i not in chosen))
    return [starts[i] for i in chosen[:BATCH]]
