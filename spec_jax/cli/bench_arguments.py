"""The flags of `spec-jax bench`. Imports no JAX."""

import dataclasses
import functools
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spec_jax.benchmarking import prompts
from spec_jax.cli.model_arguments import LLM_OPTIONS, add_model, require_target
from spec_jax.cli.parser import Parser, add_debug, add_field, names, numbers, whole, wholes
from spec_jax.config import (
    DRAFT_LENGTH_POLICIES,
    LLM_DTYPES,
    METHODS,
    SCORINGS,
    VERIFICATIONS,
    SamplingParams,
    SpeculativeConfig,
)
from spec_jax.errors import ConfigError, did_you_mean

OPTIONS = ("draft", "draft_quantization", "num_drafts", "prompt_lookup_max", "early_exit_layers")
OPTIONS += ("draft_vocab_size",)
"""Options of `SpeculativeConfig` with one value for all methods that have them."""
_LISTS = {
    "methods": METHODS,
    "draft_length_policy": DRAFT_LENGTH_POLICIES,
    "verification": VERIFICATIONS,
    "scoring": SCORINGS,
}

_EPILOG = """\
Every combination of the lists is measured, as far as a method supports it, and plain decoding
beside it. At temperature 0 all verifications keep the same tokens, so that only one of them is
measured. All systems take turns within each repeat. Speed-ups count against the fastest plain
decoding that was measured, tokens/s is the mean over requests (in batches: of all rows together),
and prompts are included.

FILE.jsonl has a line for each run. Ctrl-C keeps the runs that have ended, and --resume goes on.
`spec-jax report FILE.jsonl --out report.html` draws it.
"""


@dataclasses.dataclass(frozen=True)
class BenchOptions:
    """What `bench` was asked to do.

    Attributes:
      target: the target's reference.
      output: the file of results.
      resume: whether to go on with it.
      llm: further arguments of `LLM`.
      methods: how to draft.
      lookaheads: K.
      policies: of draft lengths.
      verifications: which drafted tokens to keep.
      scorings: how the target scores a draft.
      speculation: options that the methods have in common, such as the draft.
      temperatures, top_ps: how to sample; greedy decoding has no top-p.
      batch_sizes: rows decoded at once.
      prompt_sets: names and files.
      num_prompts: most prompts of each.
      max_tokens: most tokens of an answer.
      ignore_eos: whether all answers have so many.
      repeats: of everything.
      seed: of sampled requests.
      baselines: other libraries in the same run.
      command: as it was typed.
    """

    target: str
    output: Path
    resume: bool
    llm: dict[str, Any]
    methods: tuple[str, ...]
    speculation: dict[str, Any]
    command: str
    lookaheads: tuple[int, ...] = (2, 4, 8)
    policies: tuple[str, ...] = ("constant",)
    verifications: tuple[str, ...] = ("token",)
    scorings: tuple[str, ...] = ("block",)
    temperatures: tuple[float, ...] = (0.0,)
    top_ps: tuple[float, ...] = (1.0,)
    batch_sizes: tuple[int, ...] = (1,)
    prompt_sets: tuple[str, ...] = prompts.BUILT_IN
    num_prompts: int = 16
    max_tokens: int = 64
    ignore_eos: bool = False
    repeats: int = 3
    seed: int = 0
    baselines: tuple[str, ...] = ()


_DEFAULTS = {
    field.name: field.default
    for field in dataclasses.fields(BenchOptions)
    if field.default is not dataclasses.MISSING
}


def parse_bench(arguments: Sequence[str]) -> BenchOptions:
    """Parses and checks the arguments of `bench`.

    Raises:
      ConfigError: an argument is unknown, malformed or out of range, or a package is missing.
      RequestError: a file of prompts is not there.
    """
    parser = Parser("bench", "--target REF --out FILE", _EPILOG)
    add_model(parser)
    _add_systems(parser)
    _add_measurement(parser)
    group = parser.add_argument_group("output")
    group.add_argument(
        "--out", dest="output", type=Path, metavar="FILE", help="results, as JSON lines"
    )
    group.add_argument(
        "--resume", action="store_true", help="go on with the file if it is there, after Ctrl-C"
    )
    add_debug(group)
    given = parser.parse(arguments)
    require_target(given, LLM_DTYPES)
    if not given.get("output"):
        raise ConfigError("no output given; name the file of results with --out FILE.jsonl.")
    own: dict[str, Any] = {name: given[name] for name in _DEFAULTS if name in given}
    for name, value in own.items():
        if isinstance(value, list | tuple):
            own[name] = tuple(dict.fromkeys(value))
    methods = given.get("methods")
    if methods is None:
        methods = ("draft_model", "prompt_lookup") if given.get("draft") else ("prompt_lookup",)
    options = BenchOptions(
        target=given["target"],
        output=given["output"],
        resume="resume" in given,
        llm={name: given[name] for name in LLM_OPTIONS if name in given},
        methods=methods,
        speculation={name: given[name] for name in OPTIONS if name in given},
        command=f"spec-jax bench {shlex.join(arguments)}",
        **own,
    )
    _check(options)
    return options


def _add_systems(parser: Parser) -> None:
    group = parser.add_argument_group("what to compare, each a list such as a,b")

    def add(flag: str, name: str, help: str, **how: Any) -> None:
        default = _DEFAULTS[name]
        text = ",".join(map(str, default)) if isinstance(default, tuple) else default
        note = f" (default: {text})" if text not in ("", False) else ""
        group.add_argument(flag, dest=name, help=help + note, **how)

    group.add_argument(
        "--methods",
        type=names,
        metavar="NAME,...",
        help="how to draft (default: prompt_lookup, and draft_model with --draft)",
    )
    add("--num-speculative-tokens", "lookaheads", "K; 1-4 is 1,2,3,4", type=wholes, metavar="K,...")
    add("--draft-length-policy", "policies", "how K changes", type=names, metavar="NAME,...")
    add("--verification", "verifications", "tokens to keep", type=names, metavar="NAME,...")
    add("--scoring", "scorings", "how a draft is scored", type=names, metavar="NAME,...")
    add("--temperature", "temperatures", "0 is greedy", type=numbers, metavar="T,...")
    add("--top-p", "top_ps", "at temperatures above 0", type=numbers, metavar="P,...")
    add("--batch-size", "batch_sizes", "rows decoded at once", type=wholes, metavar="N,...")
    group.add_argument(
        "--baseline",
        dest="baselines",
        action="append",
        metavar="transformers|llama-cpp",
        help="also measure this library, if it is installed, one request at a time (repeatable)",
    )
    group = parser.add_argument_group("options of methods")
    option = functools.partial(add_field, group, SpeculativeConfig)
    option("draft", "draft model, named like the target", metavar="REF")
    option("draft_quantization", "as --quantization, for the draft model", metavar="NAME")
    option("num_drafts", "drafts per round, verified as a tree", type=whole, metavar="N")
    option("prompt_lookup_max", "longest n-gram looked up", type=whole, metavar="N")
    option("early_exit_layers", "layers that draft, for early_exit", type=whole, metavar="N")
    option("draft_vocab_size", "tokens that a draft model may propose", type=whole, metavar="N")


def _add_measurement(parser: Parser) -> None:
    group = parser.add_argument_group("what to decode")
    sets = "|".join((*prompts.BUILT_IN, prompts.HUMANEVAL, "FILE"))
    group.add_argument(
        "--prompt-set",
        dest="prompt_sets",
        action="append",
        metavar=sets,
        help='prompts; FILE.jsonl has the key "prompt" in each line, or "turns" as in '
        "Spec-Bench's question.jsonl, of which the first is asked (repeatable; default: "
        f"{', '.join(prompts.BUILT_IN)})",
    )
    for name, help in (
        ("num_prompts", "most prompts of each set, evenly spaced"),
        ("max_tokens", "most tokens of an answer"),
        ("repeats", "times that everything is measured"),
        ("seed", "of sampled requests"),
    ):
        flag = f"--{name.replace('_', '-')}"
        text = f"{help} (default: {_DEFAULTS[name]})"
        group.add_argument(flag, type=whole, metavar="N", help=text)
    add_field(
        group, SamplingParams, "ignore_eos", "decode past the end of sequence", action="store_true"
    )


def _check(options: BenchOptions) -> None:
    """Refuses what would fail later, before anything is loaded."""
    for name, values in (
        ("methods", options.methods),
        ("draft_length_policy", options.policies),
        ("verification", options.verifications),
        ("scoring", options.scorings),
    ):
        for value in values:
            if value not in _LISTS[name]:
                raise ConfigError(f"{name} holds {value!r}.{did_you_mean(value, _LISTS[name])}")
    for name, values, least in (
        ("num_speculative_tokens", options.lookaheads, 0),
        ("batch_size", options.batch_sizes, 1),
        ("num_prompts", (options.num_prompts,), 1),
        ("max_tokens", (options.max_tokens,), 1),
        ("repeats", (options.repeats,), 1),
        ("seed", (options.seed,), 0),
        ("max_model_len", (options.llm.get("max_model_len", 1),), 1),
    ):
        for value in values:
            if value < least:
                raise ConfigError(f"{name} is {value}; give at least {least}.")
    for temperature in options.temperatures:
        for top_p in options.top_ps:
            SamplingParams(temperature=temperature, top_p=top_p)
    for name in options.prompt_sets:
        prompts.check_known(name)
