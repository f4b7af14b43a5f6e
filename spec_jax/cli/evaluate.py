"""`spec-jax evaluate`: does a method answer as well as plain decoding?"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from spec_jax import distributed
from spec_jax.cli.decoding_options import EvaluateOptions
from spec_jax.cli.loading import job_summary, load
from spec_jax.cli.options import DISTRIBUTION
from spec_jax.cli.screen import Screen, plain_table
from spec_jax.config import SamplingParams
from spec_jax.evaluation.parity import DIFFERENT, NO_DIFFERENCE, NOT_TESTED, Estimate, Parity
from spec_jax.evaluation.quality import Quality, evaluate
from spec_jax.evaluation.tasks import Answer, Task, make_task
from spec_jax.text.json_lines import append_line, replace_lines

_STYLES = {NO_DIFFERENCE: "green", DIFFERENT: "bold red", NOT_TESTED: "yellow"}
_EXIT_CODES = {NO_DIFFERENCE: 0, DIFFERENT: 1, NOT_TESTED: 3}
"""The same as for an audit."""
_DEFAULTS = SamplingParams()


def run(options: EvaluateOptions, screen: Screen) -> int:
    """Evaluates and prints the verdict.

    Returns the exit code: 1 if the quality differs, 3 if nothing was to be seen.
    """
    screen.progress("reading the task")
    task = make_task(options.task, options.data, options.num_problems, options.chat)
    llm = load(options, screen)
    max_tokens = options.max_tokens or task.max_tokens or llm.max_model_len
    file = None
    if options.output is not None and not distributed.process()[0]:
        file = _AnswersFile(options.output, task)
    quality = evaluate(
        task,
        llm.with_speculation(options.speculative.plain),
        llm,
        dataclasses.replace(options.sampling, max_tokens=max_tokens, stop=task.stop),
        seed=options.seed,
        on_progress=screen.progress,
        on_answers=None if file is None else file.add,
    )
    if file is not None:
        file.score(quality)
    sampling = {name: getattr(options.sampling, name) for name in DISTRIBUTION}
    job = {
        "task": options.task,
        **({"chat": True} if options.chat else {}),
        **job_summary(options, llm),
        **{
            name: value
            for name, value in sampling.items()
            if name == "temperature" or value != getattr(_DEFAULTS, name)
        },
        "samples": options.sampling.n,
        "max_tokens": max_tokens,
        "seed": options.seed,
    }
    screen.report(job, quality.as_dict(), _in_words(options, quality))
    return _EXIT_CODES[quality.parity.verdict]


def _in_words(options: EvaluateOptions, quality: Quality) -> list[RenderableType]:
    """A table of the scores, its meaning, and the verdict."""
    parity, lines = quality.parity, []
    plain, speculative = (
        f"{arm.tokens_per_second:.1f}" for arm in (quality.plain, quality.speculative)
    )
    rows = [
        ("plain", *_cells(parity.plain), plain),
        (options.speculative.method, *_cells(parity.speculative), speculative),
        ("difference", *_cells(parity.difference, "+"), ""),
    ]
    if quality.differing is not None:
        answers = sum(map(len, quality.plain.answers))
        lines.append(
            f"{quality.differing} of {answers} answers have other tokens than plain decoding."
        )
    if quality.differing:
        lines.append(
            "note  greedy tokens differ where two are nearly as likely and rounding decides; "
            "`spec-jax audit` tells such near-ties from mistakes, and --dtype float32 has fewest."
        )
    table = plain_table([""], (parity.scale.name, "95 % interval", "tokens/s"), rows)
    verdict = Text(_verdict(parity, options.sampling.temperature > 0), _STYLES[parity.verdict])
    return [table, "", *lines, verdict]


def _cells(estimate: Estimate, sign: str = "") -> tuple[str, str]:
    """A mean and its interval; an interval without a width would promise too much."""
    interval = f"{estimate.low:{sign}.4f} to {estimate.high:{sign}.4f}"
    alike = estimate.low == estimate.high
    return f"{estimate.mean:{sign}.4f}", "all items alike" if alike else interval


def _verdict(parity: Parity, sampled: bool) -> str:
    if parity.verdict == NOT_TESTED:
        remedy = "a stronger target, or easier items"
        if parity.reason == "nothing was drafted":
            remedy = "prompts whose continuations the method can draft"
        return f"NOT TESTED: {parity.reason}. Give {remedy}."
    if parity.verdict == DIFFERENT:
        side = "above" if parity.difference.low > 0 else "below"
        chance = (
            " A lossless method is called different in one run of twenty by chance: repeat it with "
            "another --seed."
        )
        return (
            f"DIFFERENT: the interval of the difference is {side} 0.{chance if sampled else ''} "
            "`spec-jax audit` tests what is lost."
        )
    sensitivity = f"All {parity.items} items are scored alike."
    if parity.difference.half_width:
        sensitivity = f"The run could have seen one of {parity.detectable:.4f}."
    elif parity.detectable is not None:
        sensitivity = (
            f"All {parity.items} items are scored alike; had {parity.detectable:.0%} of all items "
            "other scores, one run of twenty would not have seen it."
        )
    return f"no difference: the interval of the difference holds 0. {sensitivity}"


class _AnswersFile:
    """The answers that `--out` asks for, on the disk before they are scored."""

    def __init__(self, path: Path, task: Task):
        self._path, self._task = path, task

    def add(self, arm: str, answers: list[list[Answer]]) -> None:
        """Appends an arm's answers, without scores."""
        for line in self._lines(arm, answers, [[None] * len(several) for several in answers]):
            append_line(self._path, line)

    def score(self, quality: Quality) -> None:
        """Replaces the answers by the same answers with their scores."""
        arms = {"plain": quality.plain, "speculative": quality.speculative}.items()
        lines = (self._lines(name, arm.answers, arm.scores) for name, arm in arms)
        replace_lines(self._path, itertools.chain.from_iterable(lines))

    def _lines(
        self, arm: str, answers: list[list[Answer]], scores: Sequence[Sequence[float | None]]
    ) -> Iterator[dict[str, Any]]:
        for item, several, values in zip(self._task.items, answers, scores, strict=True):
            for sample, (answer, score) in enumerate(zip(several, values, strict=True)):
                yield {
                    "arm": arm,
                    "item": item.name,
                    "sample": sample,
                    "text": answer.text,
                    "token_ids": list(answer.token_ids),
                    "score": score,
                }
