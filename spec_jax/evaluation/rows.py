"""Checks that a row's tokens depend only on its prompt, parameters and seed, not on its batch."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from spec_jax.config import SamplingParams
from spec_jax.engine.engine import Engine
from spec_jax.engine.requests import Request, Start
from spec_jax.evaluation.decoding import decode, drive, request
from spec_jax.evaluation.report import Check

SEEDS = 2
NOT_REPRODUCIBLE = "measured times choose the draft length, and with it the random numbers"
ROUNDED = "in bfloat16 batches of other sizes may round differently"
HOT = SamplingParams(temperature=2.0, top_k=3)
SHORT = 3
"""A neighbour ends this many times earlier than the row."""
SLOTS = 2
"""Rows of the batch that others join."""


@dataclasses.dataclass
class Rows:
    """The checks of rows beside others.

    Attributes:
      engine: the method.
      prompts: what the rows start from.
      settings: name -> how to sample.
      max_tokens: tokens of a row.
      seed: of the rows.
      on_progress: called with a line of text.
    """

    engine: Engine
    prompts: Sequence[Start]
    settings: Mapping[str, SamplingParams]
    max_tokens: int
    seed: int
    on_progress: Callable[[str], None]

    def run(self) -> list[Check]:
        """The checks: rows in one batch from the start, and rows that join a running one."""
        beside, joining = Check("rows: with neighbours"), Check("rows: that join")
        exact = self.engine.target.dtype == jnp.float32
        if not exact or not self.engine.strategy.draft_length.reproducible:
            for check in (beside, joining):
                check.leave_out(ROUNDED if not exact else NOT_REPRODUCIBLE, excused=True)
            return [beside, joining]
        self.on_progress("decoding rows beside others")
        random = np.random.default_rng(self.seed)
        for row, early, late, joins in self._rows():
            alone = decode(self.engine, [row])[0][0]
            late = dataclasses.replace(late, prompt_token_ids=[*late.prompt_token_ids, *alone])
            late = dataclasses.replace(late, max_length=late.max_length + len(alone))
            for slot, batch in enumerate(
                ([row, early, late], [late, row, early], [early, late, row])
            ):
                beside.compare(
                    decode(self.engine, batch)[0][slot] == alone,
                    "a row's tokens change with its neighbours or its slot: its random numbers, "
                    "KV slots or lengths are not its own.",
                )
            if not joins:
                continue
            # The way that `LLM` takes: slots are used again while other rows run.
            requests = [early, late, row, dataclasses.replace(early), dataclasses.replace(row)]
            said = drive(
                self.engine, requests, SLOTS, lambda low, high: int(random.integers(low, high + 1))
            )
            for text, _ in (said[2], said[4]):
                joining.compare(
                    text == alone,
                    "a row's tokens change when it joins a running batch: what a slot held before "
                    "reaches it, or the drafter's `join` does not put its state there.",
                )
        for check in (beside, joining):
            check.sample = f"{check.comparisons} texts of {self.max_tokens} tokens"
        return [beside, joining]

    def _rows(self) -> Iterator[tuple[Request, Request, Request, bool]]:
        """Rows of each setting, each with a neighbour that ends early and one that starts late.

        Those of the last setting also join: each setting has programs of its own to compile.
        """
        shortest, longest = min(self.prompts, key=len), max(self.prompts, key=len)
        brief = SamplingParams(max_tokens=max(1, self.max_tokens // SHORT))
        hot = dataclasses.replace(HOT, max_tokens=self.max_tokens)
        for number, setting in enumerate(self.settings.values()):
            for each in range(SEEDS):
                params = dataclasses.replace(setting, max_tokens=self.max_tokens)
                prompt = self.prompts[each % len(self.prompts)]
                yield (
                    request(prompt, params, key=(self.seed, 1000 * number + each)),
                    request(shortest, brief, key=(self.seed, 1)),
                    request(longest, hot, key=(self.seed, 2)),
                    number == len(self.settings) - 1,
                )
