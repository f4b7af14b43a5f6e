"""Flags, and the config objects that they become. Imports no JAX."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from spec_jax.cli.model_arguments import LLM_OPTIONS, add_model, require_target
from spec_jax.cli.parser import Parser, add_debug, add_field, number, whole
from spec_jax.cli.sampling_arguments import add_sampling, sampling_of
from spec_jax.config import (
    CONFIDENCE_THRESHOLD,
    CUSTOM,
    DRAFT_LENGTH_POLICIES,
    LLM_DTYPES,
    METHODS,
    QUANTIZATIONS,
    SCORINGS,
    VERIFICATIONS,
    SamplingParams,
    SpeculativeConfig,
    option_names,
)
from spec_jax.errors import ConfigError

_OWN = ("chat", "json", "compare", "output", "resume", "system")
_GENERATE_EPILOG = """\
Prompts are decoded together, as many at once as --max-num-seqs allows, and printed in order.
Without a prompt, standard input is the prompt. One line break at the end of a file is dropped.

--json prints, for each prompt, the keys index, prompt, text, token_ids, finish_reason, usage and
metrics, and error if the request failed; with --logprobs also logprobs (for each token by id) and
cumulative_logprob; with --compare also plain (the metrics of plain decoding) and
identical (whether it gave the same tokens; null if sampled).

--out writes the same keys to a file, each result as soon as it is there. If the job is stopped or
killed, the same command with --resume decodes what is missing.
"""


class Source(NamedTuple):
    """Where a prompt comes from: text as given, or a file."""

    kind: str
    value: str


@dataclasses.dataclass(frozen=True)
class Options:
    """What `generate` and `chat` were asked to do.

    Attributes:
      target: the target model's reference.
      speculative: how to draft and verify.
      sampling: how to sample.
      llm: further arguments of `LLM`.
      sources: where the prompts come from, in order.
      chat: whether prompts go through the chat template.
      json: print JSON lines.
      compare: decode plainly as well.
      output: a file for the results, or None.
      resume: whether to go on with it.
      system: the system message of a chat, or None.
    """

    target: str
    speculative: SpeculativeConfig
    sampling: SamplingParams
    llm: dict[str, Any]
    sources: tuple[Source, ...] = ()
    chat: bool = False
    json: bool = False
    compare: bool = False
    output: Path | None = None
    resume: bool = False
    system: str | None = None


@dataclasses.dataclass(frozen=True)
class EnvOptions:
    """What `env` was asked to do.

    Attributes:
      json: print one JSON object.
    """

    json: bool


def parse_model_command(command: str, arguments: Sequence[str]) -> Options:
    """Parses and checks the arguments of `generate` or `chat`.

    Raises:
      ConfigError: an argument is unknown, malformed or out of range, or two contradict each other.
    """
    if command == "generate":
        parser = Parser(command, "[PROMPT] --target REF", _GENERATE_EPILOG)
    else:
        parser = Parser(command, "--target REF")
    add_model(parser).add_argument(
        "--max-num-seqs",
        type=whole,
        metavar="N",
        help="most prompts decoded as one batch (default: 8)",
    )
    add_speculation(parser)
    add_sampling(parser)
    if command == "generate":
        _add_generate(parser)
    else:
        group = parser.add_argument_group("conversation")
        group.add_argument("--system", metavar="TEXT", help="tell the model how to answer")
        add_debug(group)
    given = parser.parse(arguments)
    require_target(given, LLM_DTYPES)
    for name in ("max_model_len", "max_num_seqs"):
        if given.get(name, 1) < 1:
            raise ConfigError(f"{name} is {given[name]}; give at least 1.")
    options = Options(
        target=given["target"],
        speculative=speculation_of(given),
        sampling=sampling_of(given),
        llm={name: given[name] for name in (*LLM_OPTIONS, "max_num_seqs") if name in given},
        sources=sources_of(given),
        **{name: given[name] for name in _OWN if name in given},
    )
    refuse_greedy_sampling(options)
    records = options.json or options.output is not None
    if options.sampling.logprobs is not None and not records:
        raise ConfigError(
            f"logprobs is {options.sampling.logprobs}, but only --json and --out show them."
        )
    if options.output is None and options.resume:
        raise ConfigError("resume goes on with a file; name it with --out FILE.jsonl.")
    if options.output is not None and (options.json or options.compare):
        raise ConfigError(
            f"{'json' if options.json else 'compare'} prints results, but --out writes them to a "
            "file; give one of the two."
        )
    return options


def parse_env(arguments: Sequence[str]) -> EnvOptions:
    """Parses the arguments of `env`."""
    parser = Parser("env", "")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_debug(parser)
    return EnvOptions(json="json" in parser.parse(arguments))


def speculation_of(given: dict[str, Any]) -> SpeculativeConfig:
    """How to draft and verify; with a draft and no method, the method is `draft_model`."""
    names = {name for config in METHODS.values() for name in option_names(config)}
    return SpeculativeConfig(**{name: given[name] for name in names & given.keys()})


def sources_of(given: dict[str, Any]) -> tuple[Source, ...]:
    """Where the prompts come from: first the one that stands alone, then those of flags."""
    alone = given.get("positional")
    return (*([Source("text", alone)] if alone is not None else []), *given.get("sources", ()))


def refuse_greedy_sampling(options: Options) -> None:
    """Refuses to sample with a verification that is for temperature 0."""
    if options.speculative.verification == "greedy" and options.sampling.temperature > 0:
        raise ConfigError(
            "verification 'greedy' is exact at temperature 0 only, but temperature is "
            f"{options.sampling.temperature}; use verification 'token'."
        )


_LOOKAHEADS = "4; where K changes, 8 if adaptive, else 20"


def add_speculation(parser: Parser, lookahead: str = _LOOKAHEADS) -> None:
    """The flags of `SpeculativeConfig`; `lookahead` is the default of K, in words."""
    group = parser.add_argument_group("speculation")
    add = functools.partial(add_field, group, SpeculativeConfig)
    methods = [each for each in METHODS if each != CUSTOM]
    add(
        "method",
        "how to draft, or the name of an installed package's drafter; draft_model if --draft is "
        "given",
        metavar="|".join(methods),
    )
    add("draft", "draft model, named like the target", metavar="REF")
    add(
        "num_speculative_tokens",
        f"most tokens drafted in a round (default: {lookahead})",
        type=whole,
        metavar="K",
    )
    add(
        "draft_length_policy",
        "how K changes from round to round",
        metavar="|".join(DRAFT_LENGTH_POLICIES),
    )
    add(
        "confidence_threshold",
        f"stop drafting below it, with policy confidence (default: {CONFIDENCE_THRESHOLD})",
        type=number,
        metavar="P",
    )
    add("retune_confidence", "learn the threshold from what is accepted", action="store_true")
    add(
        "verification",
        "which drafted tokens to keep; greedy needs temperature 0",
        metavar="|".join(sorted(VERIFICATIONS)),
    )
    add("scoring", "how the target scores a draft", metavar="|".join(SCORINGS))
    add(
        "scoring_consistent",
        "score K + 1 tokens in every round, and in plain decoding: equal greedy tokens in bfloat16",
        action="store_true",
    )
    add("num_drafts", "drafts per round, verified as a tree", type=whole, metavar="N")
    add(
        "prompt_lookup_max",
        "longest n-gram looked up, for prompt_lookup (default: 3)",
        type=whole,
        metavar="N",
    )
    add(
        "early_exit_layers",
        "layers that draft, for early_exit (default: a quarter)",
        type=whole,
        metavar="N",
    )
    add(
        "draft_quantization",
        "as --quantization, for the draft model (default: the same where it can be)",
        metavar="|".join(QUANTIZATIONS),
    )
    add("draft_vocab_size", "tokens that a draft model may propose", type=whole, metavar="N")


def add_prompts(group: Any) -> None:
    """The flags that name prompts."""
    group.add_argument(
        "--prompt",
        dest="sources",
        action="append",
        type=functools.partial(Source, "text"),
        metavar="TEXT",
        help="a prompt (repeatable)",
    )
    group.add_argument(
        "--prompt-file",
        dest="sources",
        action="append",
        type=functools.partial(Source, "file"),
        metavar="FILE",
        help='.jsonl: one object with the key "prompt" a line; any other file is one prompt; '
        "- is standard input (repeatable)",
    )


def add_completed_prompts(parser: Parser) -> None:
    """The flags that name prompts, one of which may stand alone, and how they are put."""
    group = parser.add_argument_group("prompts")
    group.add_argument("positional", nargs="?", metavar="PROMPT", help="a prompt")
    add_prompts(group)
    group.add_argument(
        "--chat", action="store_true", help="put prompts through the model's chat template"
    )
    group.add_argument(
        "--raw", dest="chat", action="store_false", help="complete prompts as they are (default)"
    )


def _add_generate(parser: Parser) -> None:
    add_completed_prompts(parser)
    group = parser.add_argument_group("output")
    group.add_argument(
        "--compare", action="store_true", help="also run plain decoding and show both speeds"
    )
    group.add_argument(
        "--json", action="store_true", help="print one JSON object per prompt, one a line"
    )
    group.add_argument(
        "--out", dest="output", type=Path, metavar="FILE", help="write results to this file instead"
    )
    group.add_argument("--resume", action="store_true", help="go on with the file if it is there")
    add_field(
        group,
        SamplingParams,
        "logprobs",
        "with --json or --out, log-probabilities of each token and of the N likeliest in its place",
        type=whole,
        metavar="N",
    )
    add_debug(group)
