"""The flags of `spec-jax evaluate`. Imports no JAX."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spec_jax.benchmarking import prompts
from spec_jax.cli.arguments import Options, add_speculation, refuse_greedy_sampling, speculation_of
from spec_jax.cli.model_arguments import LLM_OPTIONS, add_model, require_target
from spec_jax.cli.parser import Parser, add_debug, fields_of, whole
from spec_jax.cli.results_file import refuse_existing
from spec_jax.cli.sampling_arguments import add_distribution
from spec_jax.config import LLM_DTYPES, SamplingParams
from spec_jax.errors import ConfigError, did_you_mean

TASKS = ("humaneval", "summarization", "speech", "likelihood")
LINES_OF = {
    "summarization": '{"prompt": "...", "reference": "..."}',
    "speech": '{"audio": "talk.wav", "text": "..."}',
}
"""Tasks that need a file, and its lines."""

_EPILOG = """\
The same items are decoded plainly and with the method, and every answer has a score. The mean
scores are compared item by item, with a 95 % interval of their difference. Greedy answers have the
same tokens but for rounding; sampled ones are drawn independently.

The exit code is 1 if the interval does not hold 0 ("DIFFERENT"), and 3 if the comparison could see
nothing ("NOT TESTED"). With sampling, a lossless method is called different in one run of twenty by
chance; `spec-jax audit` is the stricter test.

--task humaneval runs programs that the model writes. They run in processes of their own, each with
limits of time and memory, but not in a sandbox: use a container, or a machine where nothing can be
lost. The packages that score answers are those of the extra `evaluate`.
"""


@dataclasses.dataclass(frozen=True)
class EvaluateOptions(Options):
    """What `evaluate` was asked to do.

    Attributes:
      task: one of `TASKS`.
      data: the file or set of prompts, if any.
      num_problems: most items; None for all.
      max_tokens: most tokens of an answer; None for the task's own.
      seed: of sampled answers.
    """

    task: str = ""
    data: str | None = None
    num_problems: int | None = None
    max_tokens: int | None = None
    seed: int = 0


def parse_evaluate(arguments: Sequence[str]) -> EvaluateOptions:
    """Parses and checks the arguments of `evaluate`.

    Raises:
      ConfigError: an argument is unknown, malformed or out of range, or two contradict each other.
      RequestError: a file of data is not there.
    """
    parser = Parser("evaluate", "--task NAME --target REF", _EPILOG)
    _add_task(parser)
    add_model(parser).add_argument(
        "--max-num-seqs", type=whole, metavar="N", help="most rows decoded at once (default: 8)"
    )
    add_speculation(parser)
    group = parser.add_argument_group(
        "sampling", "Task likelihood samples at temperature 1 unless you say otherwise."
    )
    add_distribution(group)
    group.add_argument(
        "--seed", type=whole, metavar="N", help="another seed samples other answers (default: 0)"
    )
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object")
    group.add_argument(
        "--out",
        dest="output",
        type=Path,
        metavar="FILE",
        help="also write the answers to this file as JSON lines, as soon as they are decoded; "
        "their scores follow",
    )
    add_debug(group)
    given = parser.parse(arguments)
    require_target(given, LLM_DTYPES)
    own: dict[str, Any] = {
        name: given.pop(name)
        for name in ("task", "data", "num_problems", "max_tokens", "seed")
        if name in given
    }
    samples = given.pop("samples", 1)
    for name, value, least in (
        ("num_problems", own.get("num_problems", 2), 2),
        ("samples", samples, 1),
        ("max_tokens", own.get("max_tokens", 1), 1),
        ("seed", own.get("seed", 0), 0),
        ("max_num_seqs", given.get("max_num_seqs", 1), 1),
        ("max_model_len", given.get("max_model_len", 1), 1),
    ):
        if value < least:
            raise ConfigError(f"{name} is {value}; give at least {least}.")
    _check_task(own, "allow_code_execution" in given)
    sampling = fields_of(SamplingParams, given)
    if own["task"] == "likelihood":
        sampling.setdefault("temperature", 1.0)
    options = EvaluateOptions(
        target=given["target"],
        speculative=speculation_of(given),
        sampling=SamplingParams(n=samples, **sampling),
        llm={name: given[name] for name in (*LLM_OPTIONS, "max_num_seqs") if name in given},
        json="json" in given,
        output=given.get("output"),
        **own,
    )
    if options.speculative.method == "none":
        raise ConfigError(
            "method is 'none', but plain decoding is what a method is compared with; give --draft "
            "or --method."
        )
    if samples > 1 and not options.sampling.temperature:
        raise ConfigError(
            f"samples is {samples}, but at temperature 0 all answers to an item are the same; give "
            "a --temperature, or leave --samples out."
        )
    refuse_greedy_sampling(options)
    if options.output is not None:
        refuse_existing(options.output)
    return options


def _add_task(parser: Parser) -> None:
    group = parser.add_argument_group("task")
    group.add_argument(
        "--task",
        metavar="|".join(TASKS),
        help="pass@1 of HumanEval; ROUGE-2 F1 of summaries; word error rate of transcriptions; or "
        "how likely answers are under the target alone",
    )
    group.add_argument(
        "--data",
        metavar="FILE",
        help="a .jsonl file, an object a line: summarization has the keys prompt, reference and "
        "optionally chat (default: true); speech has audio, relative to the file, and text; "
        f"likelihood has prompt, or takes {', '.join(prompts.BUILT_IN)} (default: all three)",
    )
    group.add_argument(
        "--num-problems", type=whole, metavar="N", help="most items, evenly spaced (default: all)"
    )
    group.add_argument(
        "--samples", type=whole, metavar="N", help="answers to each item, sampled (default: 1)"
    )
    group.add_argument(
        "--max-tokens",
        type=whole,
        metavar="N",
        help="most tokens of an answer (default: 512 for humaneval, what the model takes for "
        "speech, and 128)",
    )
    group.add_argument(
        "--allow-code-execution",
        action="store_true",
        help="let humaneval run what the model writes on this machine",
    )


def _check_task(own: dict[str, Any], allowed: bool) -> None:
    task, data = own.get("task"), own.get("data")
    if task is None:
        raise ConfigError(f"no task given; name one with --task: {', '.join(TASKS)}.")
    if task not in TASKS:
        raise ConfigError(f"task is {task!r}.{did_you_mean(task, TASKS)}")
    if task == "humaneval":
        if data is not None:
            raise ConfigError(f"data is {data!r}, but task 'humaneval' has its own; leave it out.")
        if not allowed:
            raise ConfigError(
                "task 'humaneval' runs code that the model writes, in a subprocess with limits of "
                "time and memory but without a sandbox; if this machine may do that, give "
                "--allow-code-execution."
            )
    elif allowed:
        raise ConfigError(f"task {task!r} runs no code; leave --allow-code-execution out.")
    elif task == "likelihood":
        if data is not None:
            prompts.check_known(data)
    elif data is None:
        raise ConfigError(
            f"task {task!r} needs data; name a .jsonl file of lines {LINES_OF[task]} with --data."
        )
