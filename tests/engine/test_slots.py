"""How much of a prompt a slot has computed already, at every boundary."""

import dataclasses

import numpy as np
import pytest

from spec_jax.engine.requests import PADDING
from spec_jax.engine.slots import Slot

TEXT = np.arange(200, dtype=np.int32)


def shared(num_text: int, prompt, block: int | None = 32) -> int:
    slot = Slot()
    slot.hold(TEXT[:num_text])
    return slot.num_shared(dataclasses.replace(PADDING, prompt_token_ids=list(prompt)), block)


@pytest.mark.parametrize(
    ("num_text", "num_prompt", "expected"),
    [
        (65, 150, 64),
        (64, 150, 32),  # the cache holds all of a text but its last token
        (33, 150, 32),
        (32, 150, 0),
        (200, 66, 64),
        (200, 65, 32),  # the last two tokens of a prompt are always read
        (200, 34, 32),
        (200, 33, 0),
        (0, 150, 0),
    ],
)
def test_whole_blocks_that_the_cache_holds_are_shared(num_text, num_prompt, expected):
    assert shared(num_text, TEXT[:num_prompt]) == expected


def test_what_differs_is_not_shared():
    for at, expected in ((33, 32), (31, 0), (0, 0), (100, 96)):
        prompt = TEXT[:150].copy()
        prompt[at] = -1
        assert shared(200, prompt) == expected


def test_a_cache_that_cannot_be_cut_is_shared_as_it_is_or_not_at_all():
    assert shared(65, TEXT[:150], None) == 64
    assert shared(65, TEXT[:65], None) == 0
    assert shared(65, [*TEXT[:60], *TEXT[:60]], None) == 0
