"""`spec-jax bench --serve`: measures a server."""

import asyncio
import dataclasses
import itertools
import json
import random
from pathlib import Path

from spec_jax.benchmarking import prompts
from spec_jax.benchmarking.server_load import (
    LoadClient,
    Question,
    ServedAnswer,
    Summary,
    closed_loop,
    open_loop,
)
from spec_jax.cli.screen import Screen, plain_table
from spec_jax.cli.server_options import BenchServeOptions
from spec_jax.errors import RequestError
from spec_jax.text.prompt_files import read_text

_NUMBERS = ("tokens/s", "first, ms", "p99", "token, ms", "p99", "goodput/s", "accepted", "failed")


def run(options: BenchServeOptions, screen: Screen) -> int:
    """Measures and prints a table; returns 1 if every request of a load failed."""
    if options.lengths is None:
        prompts.check_known(options.prompt_set)
    else:
        _lengths(options.lengths)
    loads = [("clients", each) for each in options.concurrency]
    if options.rate:
        loads = [("a second", each) for each in options.rate]
    rows, failed = [], False
    for load, answers in asyncio.run(_measure(options, loads, screen)).items():
        summary = Summary.of(answers, options.first_limit / 1000, options.token_limit / 1000)
        failed |= summary.num_failed == len(answers)
        rows.append(_row(load, summary))
        if (error := next((each.error for each in answers if each.error), None)) is not None:
            screen.note(f"{load}: {error}")
        if options.output is not None:
            with options.output.open("a", encoding="utf-8") as file:
                for each in answers:
                    file.write(json.dumps({"load": load, **dataclasses.asdict(each)}) + "\n")
    screen.settle()
    screen.show(plain_table(["load"], _NUMBERS, rows))
    return int(failed)


async def _measure(
    options: BenchServeOptions, loads: list, screen: Screen
) -> dict[str, list[ServedAnswer]]:
    fields = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    if options.ignore_eos:
        fields["ignore_eos"] = True
    results: dict[str, list[ServedAnswer]] = {}
    count = itertools.count(1)
    total = options.num_requests * len(loads)
    async with LoadClient(options.serve, options.api_key, fields) as client:
        questions = _questions(options, await client.choose_model(options.model))
        await client.ask(questions[0], 0.0)
        for kind, size in loads:
            load = f"{size:g} {kind}"

            def answered(load: str = load) -> None:
                screen.count(next(count), total, "requests", load)

            if kind == "clients":
                results[load] = await closed_loop(client, questions, size, answered)
            else:
                rng = random.Random(options.seed)
                results[load] = await open_loop(client, questions, size, rng, answered)
    return results


def _questions(options: BenchServeOptions, vocab_size: int) -> list[Question]:
    if options.lengths is not None:
        rng = random.Random(options.seed)
        some = [Question.of_length(*each, vocab_size, rng) for each in _lengths(options.lengths)]
    else:
        chosen = prompts.load(options.prompt_set).some(options.num_requests).prompts
        some = [*map(Question.of, chosen)]
    return [*itertools.islice(itertools.cycle(some), options.num_requests)]


def _lengths(path: Path) -> list[tuple[int, int]]:
    """The pairs of numbers of a file.

    Raises:
      RequestError: a line holds something else.
    """
    pairs = []
    for number, line in enumerate(read_text(path, str(path)).splitlines(), start=1):
        parts = line.replace(",", " ").split()
        if not parts:
            continue
        if len(parts) != 2 or not all(each.isdecimal() and int(each) > 0 for each in parts):
            raise RequestError(
                f"{path}, line {number} is {line[:40]!r}; give tokens of a prompt and of an answer."
            )
        pairs.append((int(parts[0]), int(parts[1])))
    if not pairs:
        raise RequestError(f"{path} holds no lengths; give a line of two numbers for each request.")
    return pairs


def _row(load: str, summary: Summary) -> list[str]:
    acceptance = summary.acceptance
    return [
        load,
        f"{summary.tokens_per_second:.1f}",
        *(f"{1000 * each:.0f}" for each in summary.first),
        *(f"{1000 * each:.1f}" for each in summary.token),
        f"{summary.goodput:.2f}",
        "" if acceptance is None else f"{acceptance:.0%}",
        str(summary.num_failed) if summary.num_failed else "",
    ]
