"""`spec-jax evaluate`: does a method answer as well as plain decoding?"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from spec_jax import distributed
from spec_jax.cli.decoding_options import EvaluateOptions
from spec_jax.cli.loading import job_summary, load
from spec_jax.cli.screen import Screen, plain_table
from spec_jax.config import SamplingParams
from spec_jax.evaluation.parity import DIFFERENT, NO_DIFFERENCE, NOT_TESTED, Estimate, Parity
from spec_jax.evaluation.quality import Quality, evaluate
from spec_jax.evaluation.tasks import Answer, Task, make_task
from spec_jax.llm import LLM
from spec_jax.text.json_lines import append_line, replace_lines

_STYLES = {NO_DIFFERENCE: "green", DIFFERENT: "bold red", NOT_TESTED: "yellow"}
_EXIT_CODES = {NO_DIFFERENCE: 0, DIFFERENT: 1, NOT_TESTED: 3}
"""The same as for an audit."""
_SHAPING = ("top_k", "top_p", "min_p")
_SHAPING += ("repetition_penalty", "presence_penalty", "frequency_penalty")
_DEFAULTS = SamplingParams()


def run(options: EvaluateOptions) -> int:
    """Evaluates and prints the verdict.

    Returns the exit code: 1 if the quality differs, 3 if nothing was to be seen.
    """
    with Screen(json_lines=options.json) as screen:
        screen.progress("reading the task")
        task = make_task(options.task, options.data, options.num_problems)
        llm = load(options, screen)
        most = options.max_tokens or task.max_tokens or llm.max_model_len
        file = None
        if options.output is not None and not distributed.process()[0]:
            file = _AnswersFile(options.output, task)
        quality = evaluate(
            task,
            llm.with_speculation(options.speculative.plain),
            llm,
            dataclasses.replace(options.sampling, max_tokens=most, stop=task.stop),
            seed=options.seed,
            on_progress=screen.progress,
            on_answers=None if file is None else file.add,
        )
        if file is not None:
            file.score(quality)
        evaluated = _asked(options, llm, most)
        if options.json:
            screen.record(evaluated | quality.as_dict())
        else:
            line = ", ".join(f"{name} {value}" for name, value in evaluated.items())
            *remarks, verdict = _verdict(options, quality)
            style = _STYLES[quality.parity.verdict]
            screen.show(line, "", _table(options, quality), "", *remarks, Text(verdict, style))
    return _EXIT_CODES[quality.parity.verdict]


def _asked(options: EvaluateOptions, llm: LLM, max_tokens: int) -> dict[str, Any]:
    """What was evaluated."""
    return {
        "task": options.task,
        **job_summary(options, llm),
        "temperature": options.sampling.temperature,
        **{name: value for name, value in vars(options.sampling).items() if _told(name, value)},
        "samples": options.sampling.n,
        "max_tokens": max_tokens,
        "seed": options.seed,
    }


def _told(name: str, value: object) -> bool:
    """Whether it shapes the distribution and is not the default."""
    return name in _SHAPING and value != getattr(_DEFAULTS, name)


def _table(options: EvaluateOptions, quality: Quality) -> Table:
    parity = quality.parity
    table = plain_table([""], (parity.scale.name, "95 % interval", "tokens/s"))
    table.add_row("plain", *_row(parity.plain), f"{quality.plain.tokens_per_second:.1f}")
    speed = f"{quality.speculative.tokens_per_second:.1f}"
    table.add_row(options.speculative.method, *_row(parity.speculative), speed)
    table.add_row("difference", *_row(parity.difference, "+"), "")
    return table


def _row(estimate: Estimate, sign: str = "") -> tuple[str, str]:
    """A mean and its interval; one without a width would say more than is known."""
    interval = f"{estimate.low:{sign}.4f} to {estimate.high:{sign}.4f}"
    alike = estimate.low == estimate.high
    return f"{estimate.mean:{sign}.4f}", "all items alike" if alike else interval


def _verdict(options: EvaluateOptions, quality: Quality) -> list[str]:
    """What the table means; the last line is the verdict."""
    parity, lines = quality.parity, []
    if quality.differing is not None:
        answers = sum(map(len, quality.plain.answers))
        lines.append(
            f"{quality.differing} of {answers} answers have other tokens than plain decoding."
        )
        if quality.differing:
            lines.append(
                "note  greedy tokens differ where two are nearly as likely and rounding decides; "
                "`spec-jax audit` tells such near-ties from mistakes, and --dtype float32 has "
                "fewest."
            )
    if parity.verdict == NOT_TESTED:
        lines.append(f"NOT TESTED: {parity.reason}. Give {_remedy(parity)}.")
    elif parity.verdict == DIFFERENT:
        side = "above" if parity.difference.low > 0 else "below"
        chance = (
            " A lossless method is called different in one run of twenty by chance: repeat it with "
            "another --seed."
            if options.sampling.temperature
            else ""
        )
        lines.append(
            f"DIFFERENT: the interval of the difference is {side} 0.{chance} `spec-jax audit` "
            "tests what is lost."
        )
    else:
        lines.append(f"no difference: the interval of the difference holds 0. {_seen(parity)}")
    return lines


def _remedy(parity: Parity) -> str:
    if parity.reason == "nothing was drafted":
        return "prompts whose continuations the method can draft"
    return "a stronger target, or easier items"


def _seen(parity: Parity) -> str:
    """How small a difference could have been seen."""
    if parity.difference.half_width:
        return f"The run could have seen one of {parity.detectable:.4f}."
    alike = f"All {parity.items} items are scored alike"
    if parity.detectable is None:
        return f"{alike}."
    return (
        f"{alike}; had {parity.detectable:.0%} of all items other scores, one run of twenty would "
        "not have seen it."
    )


class _AnswersFile:
    """The answers that `--out` asks for, on the disk before they are scored."""

    def __init__(self, path: Path, task: Task):
        self._path, self._task = path, task

    def add(self, arm: str, answers: list[list[Answer]]) -> None:
        """Appends an arm's answers, without scores."""
        for line in self._lines(arm, answers, [[None] * len(several) for several in answers]):
            append_line(self._path, line)

    def score(self, quality: Quality) -> None:
        """Writes the same answers with their scores instead."""
        replace_lines(
            self._path,
            (
                line
                for name, arm in (("plain", quality.plain), ("speculative", quality.speculative))
                for line in self._lines(name, arm.answers, arm.scores)
            ),
        )

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
