"""Checks that a row's tokens depend only on its prompt, parameters and seed, not on its batch."""

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp

from spec_jax.config import SamplingParams
from spec_jax.engine.engine import Engine
from spec_jax.engine.requests import Start
from spec_jax.evaluation.greedy import decode, request
from spec_jax.evaluation.report import Check

SEEDS = 2
NOT_REPRODUCIBLE = "measured times choose the draft length, and with it the random numbers"
HOT = SamplingParams(temperature=2.0, top_k=3)
SHORT = 3
"""A neighbour ends this many times earlier than the row."""


def check_rows(
    engine: Engine,
    prompts: Sequence[Start],
    settings: dict[str, SamplingParams],
    *,
    max_tokens: int,
    seed: int,
    on_progress: Callable[[str], None],
) -> Check:
    """Decodes rows alone, and in each slot of a batch beside neighbours of other kinds."""
    check = Check("rows: with neighbours")
    if not engine.strategy.draft_length.reproducible:
        check.reason = NOT_REPRODUCIBLE
        return check
    on_progress("decoding rows beside others")
    shortest, longest = min(prompts, key=len), max(prompts, key=len)
    brief = SamplingParams(max_tokens=max(1, max_tokens // SHORT))
    hot = dataclasses.replace(HOT, max_tokens=max_tokens)
    differing = 0
    for number, setting in enumerate(settings.values()):
        for each in range(SEEDS):
            params = dataclasses.replace(setting, max_tokens=max_tokens)
            row = request(prompts[each % len(prompts)], params, key=(seed, 1000 * number + each))
            alone = decode(engine, [row])[0][0]
            early = request(shortest, brief, key=(seed, 1))
            late = request(longest.then(alone), hot, key=(seed, 2))
            for slot, batch in enumerate(
                ([row, early, late], [late, row, early], [early, late, row])
            ):
                same = decode(engine, batch)[0][slot] == alone
                differing += not same
                check.compare(
                    same or engine.target.dtype == jnp.bfloat16,
                    "a row's tokens change with its neighbours or its slot: its random numbers, "
                    "KV slots or lengths are not its own.",
                )
    check.sample = f"{check.comparisons} texts of {max_tokens} tokens"
    if differing and not check.failures:
        check.notes.append(
            f"{differing} texts differ; in bfloat16 batches of other sizes may round differently."
        )
    return check
