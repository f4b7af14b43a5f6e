"""The flags of `spec-jax profile`. Imports no JAX."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from spec_jax.cli.arguments import (
    Options,
    add_completed_prompts,
    add_speculation,
    refuse_greedy_sampling,
    sources_of,
    speculation_of,
)
from spec_jax.cli.model_arguments import LLM_OPTIONS, add_model, require_target
from spec_jax.cli.parser import Parser, add_debug, whole
from spec_jax.cli.sampling_arguments import add_sampling, sampling_of
from spec_jax.config import LLM_DTYPES
from spec_jax.errors import ConfigError

ROUNDS = 32

_EPILOG = """\
The prompts are decoded three times as one batch: to compile, to measure, and to record. The table
divides the recorded wall time among prefill (the prompts, and all that the host does for them), the
parts of a round (propose, score, verify, commit), other ops, and the host: time during which no op
ran. Every moment counts once: for the op that runs, in equal parts for ops that run at once, for a
loop only while nothing inside it runs. An op fused from several parts counts as one.

DIR gets the trace itself. Without a prompt, standard input is the prompt.
"""


@dataclasses.dataclass(frozen=True)
class ProfileOptions(Options):
    """What `profile` was asked to do; `output` is the directory of the trace.

    Attributes:
      rounds: most rounds that are recorded.
    """

    rounds: int = ROUNDS


def parse_profile(arguments: Sequence[str]) -> ProfileOptions:
    """Parses and checks the arguments of `profile`.

    Raises:
      ConfigError: an argument is unknown, malformed or out of range, two contradict each other, or
        the directory holds something or cannot be made.
    """
    parser = Parser("profile", "--target REF --out DIR", _EPILOG)
    add_model(parser)
    add_speculation(parser)
    add_sampling(parser, "as many as the rounds can give")
    add_completed_prompts(parser)
    group = parser.add_argument_group("recording")
    group.add_argument(
        "--out",
        dest="output",
        type=Path,
        metavar="DIR",
        help="where the trace is written: a directory that is empty or not there yet",
    )
    group.add_argument(
        "--rounds",
        type=whole,
        metavar="N",
        help=f"most rounds that are recorded (default: {ROUNDS})",
    )
    group.add_argument("--json", action="store_true", help="print one JSON object")
    add_debug(group)
    given = parser.parse(arguments)
    require_target(given, LLM_DTYPES)
    rounds = given.get("rounds", ROUNDS)
    for name, value in (("rounds", rounds), ("max_model_len", given.get("max_model_len", 1))):
        if value < 1:
            raise ConfigError(f"{name} is {value}; give at least 1.")
    speculative = speculation_of(given)
    given.setdefault("max_tokens", rounds * (speculative.lookahead + 1))
    options = ProfileOptions(
        target=given["target"],
        speculative=speculative,
        sampling=sampling_of(given),
        llm={name: given[name] for name in LLM_OPTIONS if name in given},
        sources=sources_of(given),
        chat=given.get("chat", False),
        json="json" in given,
        output=_free(given.get("output")),
        rounds=rounds,
    )
    refuse_greedy_sampling(options)
    return options


def _free(directory: Path | None) -> Path:
    """The directory, if a trace can be written there and nothing is there yet."""
    if directory is None:
        raise ConfigError("no output given; name the directory of the trace with --out DIR.")
    if not directory.absolute().parent.is_dir() or (directory.exists() and not directory.is_dir()):
        raise ConfigError(
            f"out is {str(directory)!r}; give a directory, in one that exists, for the trace."
        )
    if directory.is_dir() and any(directory.iterdir()):
        raise ConfigError(
            f"{directory} is not empty, and nothing is overwritten; give another --out."
        )
    return directory
