"""Samples rows with a method for the checks of sampled tokens."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.config import SamplingParams
from spec_jax.engine.batch_shape import MIN_CAPACITY, power_of_two
from spec_jax.engine.engine import Engine
from spec_jax.engine.requests import Request, RequestInput, batch_of
from spec_jax.evaluation.decoding import decode, drafts, make_request, plain_engine
from spec_jax.evaluation.independence import why_not_reproducible
from spec_jax.evaluation.recorder import play
from spec_jax.evaluation.sampled import SampledChecks
from spec_jax.evaluation.scoring import Scorer
from spec_jax.evaluation.verdict import Check

BATCH_BYTES = 2**31
"""Approximate bytes that the rows decoded together may take."""
MAX_ROWS = 4096
OnRows = Callable[[str, np.ndarray, np.ndarray], None]
SAME = "sampled: plain tokens"
MAX_ROUNDED = 1e-3
"""The share of rows in which rounding may move a draw to another token."""
CROSS_CHECKED = 2
"""Rows of each sampled batch that are also decoded in a batch of their copies."""


class SampledAudit:
    """Samples `width` tokens of each row, enough for two rounds, of `samples` rows or more.

    Batches are full, so that one program serves all.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[RequestInput],
        samples: int,
        on_progress: Callable[[str], None],
    ):
        self._engine, self._prompts, self._on_progress = engine, prompts, on_progress
        self.width = width_of(engine)
        at_once = _rows_at_once(engine, prompts, self.width)
        self._rows = min(at_once, power_of_two(samples))
        self._batches = -(-samples // self._rows)
        rows = -(-self._rows // len(prompts))
        self._scorer = Scorer(engine.target, rows=rows, width=self.width)

    def checks(
        self, settings: Mapping[str, SamplingParams], seed: int, on_rows: OnRows | None = None
    ) -> list[Check]:
        """The sampled checks; their tests are not corrected for each other yet.

        `on_rows` is called with each setting's name, the prompts' numbers and the rows' tokens.
        """
        verification = self._engine.strategy.verification
        checks = SampledChecks(self._scorer, verification, drafts(self._engine), seed)
        among, same = Check("rows: among many"), Check(SAME)
        is_coupled = verification == "coupled" and drafts(self._engine)
        plain, num_others = plain_engine(self._engine, self._on_progress), 0
        irreproducible = why_not_reproducible(self._engine)
        for number, (name, setting) in enumerate(settings.items()):
            params = dataclasses.replace(setting, max_tokens=self.width)
            for batch in range(self._batches):
                which = np.arange(batch * self._rows, (batch + 1) * self._rows)
                which %= len(self._prompts)
                seeds = np.random.SeedSequence([seed, number, batch])
                keys = seeds.generate_state(2 * len(which), np.uint32).reshape(-1, 2)
                requests = [
                    make_request(self._prompts[i], params, key=key)
                    for i, key in zip(which.tolist(), keys, strict=True)
                ]
                where = f"{name}: batch {batch + 1} of {self._batches}"
                self._on_progress(f"sampling, {where}")
                tokens, rounds = play(self._engine, requests)
                if irreproducible is None:
                    self._compare(among, requests, tokens)
                    if is_coupled:
                        num_others += self._num_others(plain, requests, tokens)
                        same.comparisons += len(requests)
                self._on_progress(f"comparing, {where}")
                checks.add(name, params, self._prompts, which, tokens, rounds)
                if on_rows is not None:
                    on_rows(name, which, tokens)
        for check in (among, same):
            check.sample = f"{check.comparisons} texts of {self.width} tokens"
            if irreproducible is not None:
                check.leave_out(irreproducible, excused=True)
        if num_others > 1 + MAX_ROUNDED * same.comparisons:
            same.failures.append(
                f"{num_others} of {same.comparisons} texts are not plain decoding's with the same "
                "random numbers: verification, the keys of tokens, or the cache after a rollback."
            )
        return [*checks.checks(), *([same] if is_coupled else []), among]

    def _num_others(self, plain: Engine, requests: Sequence[Request], tokens: np.ndarray) -> int:
        """How many rows have other tokens than plain decoding gives them."""
        texts = decode(plain, requests)[0]
        begins = [len(request.prompt_token_ids) for request in requests]
        return sum(
            text != row[at : at + self.width].tolist()
            for text, row, at in zip(texts, tokens, begins, strict=True)
        )

    def _compare(self, check: Check, requests: Sequence[Request], tokens: np.ndarray) -> None:
        """Compares some rows of a batch with their tokens in a batch that holds only them."""
        few = min(len(requests), CROSS_CHECKED)
        copies = [requests[slot % few] for slot in range(len(requests))]
        texts, _ = decode(self._engine, copies, room_for=requests)
        for row in range(few):
            begin = len(requests[row].prompt_token_ids)
            check.compare(
                texts[row] == tokens[row, begin : begin + self.width].tolist(),
                f"a sampled row has other tokens among {len(requests)} others than beside copies "
                "of itself.",
            )


def width_of(engine: Engine) -> int:
    """Tokens sampled in a row."""
    return 2 * engine.drafter.lookahead + 2


def _rows_at_once(engine: Engine, prompts: Sequence[RequestInput], width: int) -> int:
    """How many rows to decode together, a power of two."""
    model, lookahead = engine.target, engine.drafter.lookahead
    length = max(map(len, prompts)) + width
    source = batch_of([prompt.source for prompt in prompts], len(prompts))

    def caches() -> tuple[Any, Any]:
        one = jax.tree.map(lambda leaf: leaf[:1], source)
        encoded = None if one is None else model.encode(jax.tree.map(jnp.asarray, one))
        return model.new_cache(1, max(MIN_CAPACITY, power_of_two(length))), encoded

    leaves = jax.tree.leaves(jax.eval_shape(caches))
    cached = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    # The draft's cache beside the target's; p, q, their intermediates and the rounds kept on host.
    distributions = 16 * (lookahead + 1) * model.config.vocab_size * 4
    most = max(1, BATCH_BYTES // (2 * cached + distributions))
    return min(MAX_ROWS, 1 << most.bit_length() - 1)
