"""Checks that at temperature 0 a method gives exactly the tokens of plain decoding."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from spec_jax.config import SamplingParams
from spec_jax.decoding.state import STOP
from spec_jax.engine.engine import Engine
from spec_jax.engine.requests import Request, RequestInput
from spec_jax.evaluation.decoding import (
    BATCH,
    decode,
    drafts,
    generated,
    in_batches,
    in_groups,
    make_request,
    plain_engine,
    start_of,
)
from spec_jax.evaluation.independence import why_not_reproducible
from spec_jax.evaluation.reference import reference_probabilities
from spec_jax.evaluation.scoring import Scorer, step_by_step
from spec_jax.evaluation.verdict import Check
from spec_jax.models.model import Model

BAD_WORDS = 3
"""The largest number of bad words of a text."""
MAX_STOPS = 4
"""Stop tokens tried per prompt, at different positions of accepted blocks."""
SAMPLED_TEXTS = 24
"""Texts sampled for stop tokens if no greedy text has one inside an accepted block."""
MAX_EXPLAINED = 2
"""Differences that a check explains; each takes a target call for every token before it."""
TOLERANCE = {"float32": 2.0**-13, "bfloat16": 2.0**-6}
"""How far rounding may move a logit, relative to the largest one."""


class Stop(NamedTuple):
    """A token of a request's text, used as its stop token.

    Attributes:
      position: where the token first occurs.
      inside: whether the accepted block continues after it.
    """

    request: Request
    text: list[int]
    position: int
    inside: bool

    def stopped(self) -> Request:
        """The request with the stop."""
        return dataclasses.replace(self.request, stop_token_ids=(self.text[self.position],))


@dataclasses.dataclass
class GreedyChecks:
    """The greedy checks of one engine, which decodes `max_tokens` tokens from each prompt."""

    engine: Engine
    prompts: Sequence[RequestInput]
    max_tokens: int
    on_progress: Callable[[str], None]

    def __post_init__(self) -> None:
        self.plain = plain_engine(self.engine, self.on_progress)
        self.scorer = Scorer(self.engine.target, rows=1, width=self.max_tokens)
        self.drafts = drafts(self.engine)

    def run(self) -> list[Check]:
        """The checks: the tokens, the same under every processor, and stops."""
        self.on_progress("decoding greedily")
        params = SamplingParams(max_tokens=self.max_tokens)
        requests = [make_request(prompt, params) for prompt in self.prompts]
        tokens = Check("greedy: plain tokens")
        expected = self._same(tokens, requests)
        processors = Check("greedy: processors")
        self._same(processors, self._processed(requests, expected))
        return [tokens, processors, self._stops(params, expected)]

    def _processed(self, requests: list[Request], texts: list[list[int]]) -> list[Request]:
        """The requests with penalties, bias, bad words and `min_tokens`, all of which matter."""
        common = [token for token, _ in Counter(itertools.chain(*texts)).most_common(3)]
        params = SamplingParams(
            max_tokens=self.max_tokens,
            repetition_penalty=1.2,
            presence_penalty=0.2,
            frequency_penalty=0.4,
            logit_bias=dict(zip(common, (float("-inf"), 0.5, -0.5), strict=False)),
        )
        requests = [dataclasses.replace(each, sampling=params) for each in requests]
        # The text would contain each of these words next, so every one of them has an effect. The
        # first row of a batch has the fewest.
        for turn in range(BAD_WORDS):
            words = (_word(text, turn) for text in self._plainly(requests))
            requests = [
                dataclasses.replace(each, bad_words=[*each.bad_words, *more])
                if turn <= number % BATCH
                else each
                for number, (each, more) in enumerate(zip(requests, words, strict=True))
            ]
        return [
            _stopped(each, text)
            for each, text in zip(requests, self._plainly(requests), strict=True)
        ]

    def _plainly(self, requests: list[Request]) -> list[list[int]]:
        """The tokens of plain decoding."""
        return in_batches(requests, lambda group: decode(self.plain, group)[0])

    def _same(self, check: Check, requests: list[Request]) -> list[list[int]]:
        """Compares in batches of one and of `BATCH`; returns the tokens of plain decoding."""
        expected = self._plainly(requests)
        for request, text in zip(requests, expected, strict=True):
            self._follows_scores(check, request, text)
        numbers, drafted = list(range(len(requests))), 0
        for group in [*in_groups(numbers), *([i] for i in numbers)]:
            texts, batch = decode(self.engine, [requests[i] for i in group])
            drafted += int(batch.view.counters.drafted[: len(group)].sum())
            for i, text in zip(group, texts, strict=True):
                self._compare(check, requests[i], expected[i], text, f"in a batch of {len(group)}")
        batches = f"batches of 1 and {BATCH}"
        count = sum(map(len, expected))
        check.sample = f"{len(expected)} texts, {count} tokens, {batches}"
        if self.drafts and not drafted:
            check.leave_out("nothing was drafted")
        return expected

    def _follows_scores(self, check: Check, request: Request, text: list[int]) -> None:
        """Checks that plain decoding itself takes the likeliest token of the target's scores."""
        padded = np.zeros((1, self.max_tokens), np.int32)
        padded[0, : len(text)] = text
        logits = self.scorer.logits(start_of(request), padded)[0]
        for position, token in enumerate(text):
            scores = _scores(logits[position], request, text[:position])
            missing = float(scores.max() - scores[token])
            if not check.compare(
                missing <= _tolerance(self.engine.target, logits[position]),
                "plain decoding itself departs from the target's scores: the processors, the cache "
                f"or the prompt's reading are wrong (token {token} at position {position} is "
                f"{missing:.3g} below the likeliest).",
            ):
                return

    def _compare(
        self, check: Check, request: Request, expected: list[int], text: list[int], where: str
    ) -> None:
        """Compares two texts; their first difference is a failure unless it is a near-tie."""
        if text == expected:
            check.compare(True, "")
            return
        if len(check.failures) >= MAX_EXPLAINED:
            check.comparisons += 1
            return
        pairs = zip(expected, text, strict=False)
        position = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if position is None:
            check.compare(
                False,
                f"the method ends a text after {len(text)} tokens, plain decoding after "
                f"{len(expected)} ({where}).",
            )
            return
        near, explanation = self.explain(request, expected, position, text[position])
        explanation = f"token {position} of {len(expected)} differs {where}: {explanation}"
        if near:
            check.comparisons += 1
            check.notes.append(f"near-tie: {explanation}")
        else:
            check.compare(False, explanation)

    def explain(
        self, request: Request, expected: list[int], position: int, token: int
    ) -> tuple[bool, str]:
        """Whether rounding explains a difference, and the scores that show it."""
        model, prompt = self.engine.target, start_of(request)
        before, best = expected[:position], expected[position]
        width = self.engine.drafter.lookahead + 1
        single, block = (step_by_step(model, prompt, before, each) for each in (1, width))
        one, several = (_scores(each, request, before) for each in (single, block))
        margin, block_margin = (float(each[best] - each[token]) for each in (one, several))
        rounding = float(np.abs(single - block).max())
        if model.dtype == jnp.bfloat16:
            near = margin <= 2 * rounding or block_margin < 0
        else:
            near = margin <= _tolerance(model, single)
        comparison = (
            f"{best} became {token}; of the two, {best} scores {one[best]:.6g} and {token} "
            f"{one[token]:.6g} one token a call, {several[best]:.6g} and {several[token]:.6g} in "
            f"blocks of {width} (logits apart by at most {rounding:.2g})"
        )
        if near:
            return True, comparison + "."
        return False, comparison + (
            ". Neither score explains it: verification, the cache after a rollback, or what the "
            "penalties see inside a draft is wrong."
        )

    def _stops(self, params: SamplingParams, expected: list[list[int]]) -> Check:
        """Checks that stop tokens, chosen from the text, end it right after they first occur."""
        check = Check("greedy: stop tokens")
        requests = [make_request(prompt, params) for prompt in self.prompts]
        chosen = self._stops_of(requests, expected)
        if self.drafts and not any(each.inside for each in chosen):
            chosen += self._sampled_stops()
        groups = [*in_groups(chosen), *([each] for each in chosen[:1])] if chosen else []
        for group in groups:
            requests = [each.stopped() for each in group]
            texts, batch = decode(self.engine, requests)
            for row, (each, request, ours) in enumerate(zip(group, requests, texts, strict=True)):
                right = each.text[: each.position + 1]
                if ours[: len(right)] != right and not request.sampling.temperature:
                    self._compare(check, request, right, ours, "with a stop token")
                    continue
                check.compare(
                    ours == right and int(batch.view.finish[row]) == STOP,
                    "a stop token inside an accepted block does not end the text where "
                    "token-by-token decoding would.",
                )
        inside = sum(each.inside for each in chosen)
        check.sample = f"{len(chosen)} stops, {inside} inside a block"
        if self.drafts and not inside:
            check.leave_out("no block was accepted in which a stop token could stand")
        return check

    def _sampled_stops(self) -> list["Stop"]:
        """Stops inside blocks of sampled texts, whose drafts are accepted by chance."""
        if why_not_reproducible(self.engine):
            return []
        params = SamplingParams(temperature=1.0, max_tokens=self.max_tokens)
        requests = [
            make_request(self.prompts[i % len(self.prompts)], params, key=(0, i))
            for i in range(SAMPLED_TEXTS)
        ]
        stops = self._stops_of(requests)
        return [each for each in stops if each.inside][:MAX_STOPS]

    def _stops_of(
        self, requests: list[Request], texts: Sequence[list[int]] | None = None
    ) -> list[Stop]:
        """Stops in the accepted blocks of each request; in these texts, or in the method's."""
        played = in_batches(requests, self._played)
        return [
            Stop(request, text, *position)
            for request, (_, ends), text in zip(
                requests, played, texts or [text for text, _ in played], strict=True
            )
            for position in _stop_positions(text, ends)
        ]

    def _played(self, requests: list[Request]) -> Iterator[tuple[list[int], list[int]]]:
        """The method's texts, and where the rounds of each end."""
        batch = self.engine.start(requests)
        ends, texts = [[0] for _ in requests], generated(batch, requests)
        while batch.running:
            batch.advance(1)
            texts = generated(batch, requests)
            for row, text in zip(ends, texts, strict=True):
                if len(text) > row[-1]:
                    row.append(len(text))
        return zip(texts, ends, strict=True)


def _stop_positions(text: list[int], ends: list[int]) -> list[tuple[int, bool]]:
    """Positions of first occurrences in a text, each at another distance from its block's start."""
    chosen: dict[int, tuple[int, bool]] = {}
    for start, end in itertools.pairwise(ends):
        for position in range(start, min(end, len(text))):
            # The last token of a block ends it anyway.
            if text.index(text[position]) == position:
                inside = position < end - 1
                key = position - start if inside else -1
                chosen.setdefault(key, (position, inside))
    return sorted(chosen.values(), key=lambda each: not each[1])[:MAX_STOPS]


def _word(text: list[int], turn: int) -> list[list[int]]:
    """A word of two to four tokens of a text, further on in each turn; or none."""
    first, size = 2 + turn * (len(text) // (2 * BAD_WORDS)), 2 + turn % 3
    return [text[first : first + size]] if first + size <= len(text) else []


def _stopped(request: Request, text: list[int]) -> Request:
    """The request with a stop token that `min_tokens` forbids until its text contains it.

    It is the last token of the text that occurs for the first time; an empty text has none.
    """
    firsts = {token: text.index(token) for token in text}
    if not firsts:
        return request
    token, position = max(firsts.items(), key=lambda each: each[1])
    sampling = dataclasses.replace(request.sampling, min_tokens=position)
    return dataclasses.replace(request, stop_token_ids=(token,), sampling=sampling)


def _scores(logits: np.ndarray, request: Request, generated: list[int]) -> np.ndarray:
    """Log-probabilities after the processors: logits up to a constant."""
    prompt = list(request.prompt_token_ids)
    probabilities = reference_probabilities(
        logits,
        [*prompt, *generated],
        len(prompt),
        dataclasses.replace(request.sampling, temperature=1.0),
        stop_token_ids=request.stop_token_ids,
        bad_words=request.bad_words,
    )
    with np.errstate(divide="ignore"):
        return np.log(probabilities)


def _tolerance(model: Model, logits: np.ndarray) -> float:
    """The largest effect of rounding on a difference of two of these logits."""
    return TOLERANCE[model.dtype.name] * max(1.0, float(np.abs(logits).max()))
