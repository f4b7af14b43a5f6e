"""Checks that a row's tokens depend only on its prompt, parameters and seed, not on its batch."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.config import SamplingParams
from spec_jax.engine.engine import Engine
from spec_jax.engine.requests import Request, RequestInput
from spec_jax.evaluation.decoding import decode, drive, make_request
from spec_jax.evaluation.verdict import Check
from spec_jax.models.model import Model

SEEDS = 2
NOT_REPRODUCIBLE = "measured times choose the draft length, and with it the random numbers"
ROUNDED = "in bfloat16 batches of other sizes may round differently"
DRAFT_ROUNDED = "the draft is in bfloat16, where batches of other sizes may round differently"
HOT = SamplingParams(temperature=2.0, top_k=3)
SHORT = 3
"""A neighbour ends this many times earlier than the row."""
SLOTS = 2
"""Rows of the batch that others are inserted into."""


def why_not_reproducible(engine: Engine) -> str | None:
    """Why a lossless method may emit other tokens in another batch; None if it may not.

    A draft that rounds differently proposes other tokens, so that other random numbers decide,
    unless verification is coupled: then the target alone decides.
    """
    is_coupled = engine.strategy.verification == "coupled"
    if not (is_coupled or engine.strategy.draft_length.reproducible):
        return NOT_REPRODUCIBLE
    if engine.target.dtype != jnp.float32:
        return ROUNDED
    if is_coupled:
        return None
    parts = jax.tree.leaves(engine.drafter, is_leaf=lambda part: isinstance(part, Model))
    dtypes = [part.dtype if isinstance(part, Model) else jnp.result_type(part) for part in parts]
    return DRAFT_ROUNDED if jnp.bfloat16 in dtypes else None


@dataclasses.dataclass
class IndependenceChecks:
    """Checks that a row of `max_tokens` tokens does not depend on the other rows."""

    engine: Engine
    prompts: Sequence[RequestInput]
    settings: Mapping[str, SamplingParams]
    max_tokens: int
    seed: int
    on_progress: Callable[[str], None]

    def run(self) -> list[Check]:
        """The checks: rows in one batch from the start, and rows inserted into a running one.

        A row is compared with its tokens beside copies of itself, in a batch of the same shapes: a
        single row may be multiplied in another order, so that a draw near a boundary differs.
        """
        beside, inserted = Check("rows: with neighbours"), Check("rows: that join")
        if (reason := why_not_reproducible(self.engine)) is not None:
            for check in (beside, inserted):
                check.leave_out(reason, excused=True)
            return [beside, inserted]
        self.on_progress("decoding rows beside others")
        random = np.random.default_rng(self.seed)
        for row, early, late, inserts in self._rows():
            room = [row, early, _longer(late, [0] * self.max_tokens)]
            text, *copies = decode(self.engine, [row] * len(room), room_for=room)[0]
            for copy in copies:
                beside.compare(
                    copy == text,
                    "a row's tokens change with its slot: its random numbers, KV slots or lengths "
                    "belong to a place in the batch.",
                )
            late = _longer(late, text)
            batches = ([row, early, late], [late, row, early], [early, late, row])
            for slot, batch in enumerate(batches):
                beside.compare(
                    decode(self.engine, batch)[0][slot] == text,
                    "a row's tokens change with its neighbours: its random numbers, KV slots or "
                    "lengths are not its own.",
                )
            if not inserts:
                continue
            # The way that `LLM` takes: slots are used again while other rows run.
            requests = [early, late, row, dataclasses.replace(early), dataclasses.replace(row)]
            together = [dataclasses.replace(row) for _ in range(SLOTS)]
            (text, _), *_ = drive(
                self.engine, together, SLOTS, lambda low, high: high, room_for=requests
            )
            results = drive(
                self.engine, requests, SLOTS, lambda low, high: int(random.integers(low, high + 1))
            )
            for other, _ in (results[2], results[4]):
                inserted.compare(
                    other == text,
                    "a row's tokens change when it joins a running batch: what a slot held before "
                    "reaches it, or the drafter's `insert` does not put its state there.",
                )
        for check in (beside, inserted):
            check.sample = f"{check.comparisons} texts of {self.max_tokens} tokens"
        return [beside, inserted]

    def _rows(self) -> Iterator[tuple[Request, Request, Request, bool]]:
        """Rows of each setting, each with a neighbour that ends early and one that starts late.

        The rows of the last setting are also inserted: each setting compiles other programs.
        """
        brief = SamplingParams(max_tokens=max(1, self.max_tokens // SHORT))
        hot = dataclasses.replace(HOT, max_tokens=self.max_tokens)
        early = make_request(min(self.prompts, key=len), brief, key=(self.seed, 1))
        late = make_request(max(self.prompts, key=len), hot, key=(self.seed, 2))
        for number, setting in enumerate(self.settings.values()):
            for each in range(SEEDS):
                params = dataclasses.replace(setting, max_tokens=self.max_tokens)
                prompt = self.prompts[each % len(self.prompts)]
                row = make_request(prompt, params, key=(self.seed, 1000 * number + each))
                yield row, early, late, number == len(self.settings) - 1


def _longer(request: Request, token_ids: Sequence[int]) -> Request:
    """The same request after more tokens of the prompt."""
    return dataclasses.replace(
        request,
        prompt_token_ids=[*request.prompt_token_ids, *token_ids],
        max_length=request.max_length + len(token_ids),
    )
