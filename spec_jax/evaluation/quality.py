"""Quality parity: the same items decoded plainly and speculatively, answers scored and compared."""

import dataclasses
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spec_jax.config import SamplingParams
from spec_jax.evaluation.parity import Parity, compare
from spec_jax.evaluation.tasks import Answer, Task
from spec_jax.llm import LLM


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way of decoding: answers to each item, in order, and the score of each answer.

    `seconds` is the wall time of decoding, prompts included, without compilation.
    """

    answers: list[list[Answer]]
    scores: list[list[float]]
    seconds: float

    def total(self, field: str) -> int:
        """The sum over answers of `drafted` or `accepted`."""
        return sum(getattr(each, field) for several in self.answers for each in several)

    @property
    def tokens(self) -> int:
        """The number of tokens of all answers."""
        return sum(len(each.token_ids) for several in self.answers for each in several)

    @property
    def tokens_per_second(self) -> float:
        """The sum over rows."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Counts and times, for JSON."""
        return {
            "tokens": self.tokens,
            "draft_tokens": self.total("drafted"),
            "accepted_tokens": self.total("accepted"),
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclasses.dataclass(frozen=True)
class Quality:
    """A comparison of plain and speculative answers.

    Attributes:
      differing: greedy answers with other tokens than plain decoding; None if sampled.
    """

    parity: Parity
    plain: Arm
    speculative: Arm
    differing: int | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        record: dict[str, Any] = self.parity.as_dict() | {"differing_answers": self.differing}
        record["plain"] |= self.plain.as_dict()
        record["speculative"] |= self.speculative.as_dict()
        return record


def evaluate(
    task: Task,
    plain: LLM,
    speculative: LLM,
    sampling: SamplingParams,
    *,
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda message: None,
    on_answers: Callable[[str, list[list[Answer]]], None] | None = None,
) -> Quality:
    """Decodes a task in both ways and compares the scores.

    Both ways sample alike, `n` answers to each item, and draw independently by `seed`; the seed of
    `sampling` is ignored. The likelihood of answers is computed by `plain`. `on_answers` is called
    with `plain` or `speculative` and the answers before they are scored.

    Raises:
      BenchmarkError: an answer failed.
      ConfigError, RequestError: see `LLM.generate` and `LLM.transcribe`.
    """
    sampled, decoded = sampling.temperature > 0, []
    for number, (name, llm) in enumerate((("plain", plain), ("speculative", speculative))):
        sequence = np.random.SeedSequence((seed, number))
        params = [
            dataclasses.replace(sampling, seed=int(item_seed) if sampled else None)
            for item_seed in sequence.generate_state(len(task.items), np.uint64)
        ]
        begin = time.perf_counter() - llm.engine.compile_seconds
        answers = task.decode(
            llm, params, lambda message, name=name: on_progress(f"{name}: {message}")
        )
        decoded.append((answers, time.perf_counter() - llm.engine.compile_seconds - begin))
        if on_answers is not None:
            on_answers(name, answers)
    scores = _score(task, [answers for answers, _ in decoded], plain, on_progress)
    plainly, speculatively = (
        Arm(answers, arm_scores, seconds)
        for (answers, seconds), arm_scores in zip(decoded, scores, strict=True)
    )
    parity = compare(
        task.scale,
        np.array(plainly.scores),
        np.array(speculatively.scores),
        np.array([item.weight for item in task.items]),
        reason="" if speculatively.total("drafted") else "nothing was drafted",
    )
    ids = (
        [each.token_ids for samples in arm.answers for each in samples]
        for arm in (plainly, speculatively)
    )
    differing = None if sampled else sum(map(operator.ne, *ids))
    return Quality(parity, plainly, speculatively, differing)


def _score(
    task: Task, arms: Sequence[list[list[Answer]]], target: LLM, on_progress: Callable[[str], None]
) -> list[list[list[float]]]:
    """The scores of answers, by arm and item.

    Equal answers are scored once, so that no rounding or slow machine makes their scores differ.
    """

    def key(answer: Answer) -> tuple[int, tuple[int, ...]]:
        return answer.item, answer.token_ids

    unique = {key(each): each for arm in arms for samples in arm for each in samples}
    values = task.score(list(unique.values()), target, on_progress)
    scores = dict(zip(unique, values, strict=True))
    return [[[scores[key(each)] for each in samples] for samples in arm] for arm in arms]
