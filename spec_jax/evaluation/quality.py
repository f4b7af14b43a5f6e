"""Quality parity: the same items decoded plainly and speculatively, answers scored and compared."""

import dataclasses
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
    """One way of decoding.

    Attributes:
      answers: of each item, in order.
      scores: of each answer.
      seconds: wall time of decoding, prompts included, without compilation.
    """

    answers: list[list[Answer]]
    scores: list[list[float]]
    seconds: float

    def total(self, field: str) -> int:
        """The sum over answers of `drafted` or `accepted`."""
        return sum(getattr(each, field) for several in self.answers for each in several)

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return sum(len(each.token_ids) for several in self.answers for each in several)

    @property
    def tokens_per_second(self) -> float:
        """Of all rows together."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Its counts and times, as JSON has them."""
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
      parity: scores, their difference and the verdict.
      plain: plain decoding.
      speculative: the method.
      differing: greedy answers whose tokens are not those of plain decoding; None if sampled.
    """

    parity: Parity
    plain: Arm
    speculative: Arm
    differing: int | None

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        found = self.parity.as_dict()
        for name, arm in (("plain", self.plain), ("speculative", self.speculative)):
            found[name] |= arm.as_dict()
        return found | {"differing_answers": self.differing}


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

    Args:
      task: items and their score.
      plain: decodes plainly; the likelihood of answers is its own.
      speculative: decodes with a method.
      sampling: how both sample. `n` answers are given to each item; the seed is ignored.
      seed: of sampled answers. Both ways draw independently of each other.
      on_progress: called with a line of text.
      on_answers: called with `plain` or `speculative` and the answers to each item as soon as they
        are decoded, before they are scored.

    Raises:
      BenchmarkError: an answer failed.
      ConfigError, RequestError: as of `LLM.generate` and `LLM.transcribe`.
    """
    sampled, decoded = sampling.temperature > 0, []
    for number, (name, llm) in enumerate((("plain", plain), ("speculative", speculative))):
        params = [
            dataclasses.replace(sampling, seed=int(own) if sampled else None)
            for own in np.random.SeedSequence((seed, number)).generate_state(
                len(task.items), np.uint64
            )
        ]
        begin, compiled = time.perf_counter(), llm.engine.compile_seconds
        answers = task.decode(
            llm, params, lambda message, name=name: on_progress(f"{name}: {message}")
        )
        compiled = llm.engine.compile_seconds - compiled
        decoded.append((answers, time.perf_counter() - begin - compiled))
        if on_answers is not None:
            on_answers(name, answers)
    scores = _score(task, [answers for answers, _ in decoded], plain, on_progress)
    plainly, speculatively = (
        Arm(answers, own, seconds) for (answers, seconds), own in zip(decoded, scores, strict=True)
    )
    parity = compare(
        task.scale,
        np.array(plainly.scores),
        np.array(speculatively.scores),
        np.array([item.weight for item in task.items]),
        reason="" if speculatively.total("drafted") else "nothing was drafted",
    )
    differing = None if sampled else _differing(plainly, speculatively)
    return Quality(parity, plainly, speculatively, differing)


def _score(
    task: Task, ways: Sequence[list[list[Answer]]], target: LLM, on_progress: Callable[[str], None]
) -> list[list[list[float]]]:
    """The scores of answers, way by way and item by item.

    The same answer is scored once, so that no rounding or slow machine makes its scores differ.
    """

    def key(answer: Answer) -> tuple[int, tuple[int, ...]]:
        return answer.item, answer.token_ids

    unique = {key(each): each for way in ways for several in way for each in several}
    found = task.score(list(unique.values()), target, on_progress)
    scores = dict(zip(unique, found, strict=True))
    return [[[scores[key(each)] for each in several] for several in way] for way in ways]


def _differing(plain: Arm, speculative: Arm) -> int:
    """How many answers have other tokens."""
    pairs = zip(plain.answers, speculative.answers, strict=True)
    return sum(
        one.token_ids != other.token_ids
        for ours, theirs in pairs
        for one, other in zip(ours, theirs, strict=True)
    )
