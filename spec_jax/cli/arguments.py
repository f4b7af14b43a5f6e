"""Flags, and the config objects that they become. Imports no JAX."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from spec_jax.cli.parser import Parser, add_debug, number, whole
from spec_jax.config import (
    CONFIDENCE_THRESHOLD,
    DRAFT_LENGTH_POLICIES,
    DTYPES,
    KV_CACHE_DTYPES,
    LLM_DTYPES,
    METHODS,
    MOST_SPECULATIVE_TOKENS,
    OFFLOADS,
    PROMPT_LOOKUP_MAX,
    QUANTIZATIONS,
    SCORINGS,
    VERIFICATIONS,
    SamplingParams,
    SpeculativeConfig,
)
from spec_jax.errors import ConfigError, did_you_mean

LLM_OPTIONS = (
    *("layout", "dtype", "quantization", "kv_cache_dtype"),
    *("offload", "resident_layers", "max_model_len"),
)
"""Arguments of `LLM` that are flags of every command that makes one."""

COMMANDS = (
    *("generate", "chat", "transcribe", "audit", "bench", "report"),
    *("train-draft", "convert", "plan", "env"),
)

OVERVIEW = """\
usage: spec-jax COMMAND [options]

Decode language models faster without changing what they generate.

  spec-jax generate      complete prompts
  spec-jax chat          hold a conversation
  spec-jax transcribe    write down what is said in sound files
  spec-jax audit         test on your own models that nothing is lost
  spec-jax bench         measure speed on your own models and prompts
  spec-jax report        draw what bench measured, and compare two files
  spec-jax train-draft   train a draft for your target
  spec-jax convert       write a model in another format
  spec-jax plan          project memory and speed on other machines
  spec-jax env           show versions and devices, for bug reports

  spec-jax COMMAND --help   options of a command
  spec-jax --version        the version

for example:
  spec-jax generate --target checkpoints/smollm2-135m-instruct.toml \\
    --method prompt_lookup --chat "Name three rivers." """.rstrip()

_GENERATE_EPILOG = """\
Prompts are decoded together, as many at once as --max-num-seqs allows, and printed in order.
Without a prompt, standard input is the prompt. One line break at the end of a file is dropped.

--json prints, for each prompt, the keys text, token_ids, finish_reason, usage and metrics, and
error if the request failed; with --compare also plain (the metrics of plain decoding) and
identical (whether it gave the same tokens; null if sampled).
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
    """

    target: str
    speculative: SpeculativeConfig
    sampling: SamplingParams
    llm: dict[str, Any]
    sources: tuple[Source, ...] = ()
    chat: bool = False
    json: bool = False
    compare: bool = False


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
    _add_sampling(parser)
    if command == "generate":
        _add_generate(parser)
    else:
        add_debug(parser)
    given = parser.parse(arguments)
    require_target(given, LLM_DTYPES)
    for name in ("max_model_len", "max_num_seqs"):
        if given.get(name, 1) < 1:
            raise ConfigError(f"{name} is {given[name]}; give at least 1.")
    options = Options(
        target=given["target"],
        speculative=speculation_of(given),
        sampling=SamplingParams(**fields_of(SamplingParams, given)),
        llm={name: given[name] for name in (*LLM_OPTIONS, "max_num_seqs") if name in given},
        sources=(
            *([Source("text", given["positional"])] if given.get("positional") is not None else []),
            *given.get("sources", ()),
        ),
        **{name: given[name] for name in ("chat", "json", "compare") if name in given},
    )
    refuse_greedy_sampling(options)
    return options


def parse_env(arguments: Sequence[str]) -> EnvOptions:
    """Parses the arguments of `env`."""
    parser = Parser("env", "")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_debug(parser)
    return EnvOptions(json="json" in parser.parse(arguments))


def require_target(given: dict[str, Any], dtypes: Sequence[str] = DTYPES) -> None:
    """Checks the arguments that every command that loads a model has in common."""
    if not given.get("target"):
        raise ConfigError(
            "no target given; name the model with --target: a Hugging Face directory, a .gguf "
            "file, a recipe (.toml) or a hub id."
        )
    for field, known in (
        ("dtype", dtypes),
        ("quantization", QUANTIZATIONS),
        ("kv_cache_dtype", KV_CACHE_DTYPES),
        ("offload", OFFLOADS),
    ):
        if (name := given.get(field)) is not None and name not in known:
            raise ConfigError(f"{field} is {name!r}.{did_you_mean(name, known)}")


def speculation_of(given: dict[str, Any]) -> SpeculativeConfig:
    """How to draft and verify; with a draft and no method, the method is `draft_model`."""
    if given.get("draft") and "method" not in given:
        given["method"] = "draft_model"
    return SpeculativeConfig(**fields_of(SpeculativeConfig, given))


def refuse_greedy_sampling(options: Options) -> None:
    """Refuses to sample with a verification that is for temperature 0."""
    if options.speculative.verification == "greedy" and options.sampling.temperature > 0:
        raise ConfigError(
            "verification 'greedy' is exact at temperature 0 only, but temperature is "
            f"{options.sampling.temperature}; use verification 'token'."
        )


def fields_of(config: type, given: dict[str, Any]) -> dict[str, Any]:
    """Those of the given values that are fields of a config class."""
    names = {field.name for field in dataclasses.fields(config)}
    return {name: value for name, value in given.items() if name in names}


def add_field(group: Any, config: type, name: str, help: str, **how: Any) -> None:
    """Adds the flag of a config field, with the field's default in its help."""
    default = {field.name: field.default for field in dataclasses.fields(config)}[name]
    unset = default is None or default is False or default in ((), "")
    note = "" if unset else f" (default: {default})"
    group.add_argument(f"--{name.replace('_', '-')}", help=help + note, **how)


def add_reference(
    group: Any, dtypes: Sequence[str] = DTYPES, dtype_note: str = "of weights and caches"
) -> None:
    """The flags that name a model, its layout and its dtype."""
    group.add_argument(
        "--target",
        "--model",
        metavar="REF",
        help="the model: a Hugging Face directory, one that `spec-jax convert` wrote, a .gguf "
        "file, a recipe (.toml) or a hub id org/name[@revision]",
    )
    group.add_argument(
        "--layout",
        metavar="FILE",
        help="how models are sharded over several devices or processes, one of sharding/*.toml "
        "(default: one device)",
    )
    group.add_argument(
        "--dtype", metavar="|".join(dtypes), help=f"{dtype_note} (default: {dtypes[0]})"
    )


def add_model(parser: Parser) -> Any:
    """The flags of the target and of what it may hold; returns their group."""
    group = parser.add_argument_group("model")
    add_reference(
        group,
        LLM_DTYPES,
        "of weights and caches; auto is the machine's fastest that keeps what is stored",
    )
    group.add_argument(
        "--quantization",
        metavar="|".join(QUANTIZATIONS),
        help="how the target's matrices are kept: int8 and int4 round them, gguf keeps a .gguf "
        "file's own blocks (default: auto)",
    )
    group.add_argument(
        "--kv-cache-dtype",
        metavar="|".join(KV_CACHE_DTYPES),
        help="int8 keeps keys and values in 8 bits (default: auto, not rounded)",
    )
    group.add_argument(
        "--offload",
        metavar="|".join(OFFLOADS),
        help="host keeps the target's layers in host memory and streams them in every call, for "
        "targets that do not fit in the devices' memory (default: none)",
    )
    group.add_argument(
        "--resident-layers",
        type=whole,
        metavar="N",
        help="with --offload host, layers that stay on the devices: as many as fit (default: 0)",
    )
    group.add_argument(
        "--max-model-len",
        type=whole,
        metavar="N",
        help="most tokens of prompt and completion together (default: the model's context)",
    )
    return group


def add_speculation(parser: Parser) -> None:
    """The flags of `SpeculativeConfig`."""
    group = parser.add_argument_group("speculation")
    add = functools.partial(add_field, group, SpeculativeConfig)
    add("method", "how to draft; draft_model if --draft is given", metavar="|".join(METHODS))
    add("draft", "draft model, named like the target", metavar="REF")
    add(
        "num_speculative_tokens",
        "most tokens drafted in a round (default: 4; where K changes, "
        f"{MOST_SPECULATIVE_TOKENS['adaptive']} if adaptive, else 20)",
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
    add("num_drafts", "drafts per round, verified as a tree", type=whole, metavar="N")
    add(
        "prompt_lookup_max",
        f"longest n-gram looked up, for prompt_lookup (default: {PROMPT_LOOKUP_MAX})",
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


def add_distribution(group: Any) -> None:
    """The flags that decide what the next token's distribution is."""
    add = functools.partial(add_field, group, SamplingParams)
    add("temperature", "0 is greedy", type=number, metavar="T")
    add("top_k", "keep the K likeliest tokens; 0 keeps all", type=whole, metavar="K")
    add("top_p", "keep the likeliest tokens that reach probability P", type=number, metavar="P")
    add("min_p", "drop tokens below P times the likeliest", type=number, metavar="P")
    add("repetition_penalty", "on tokens seen; 1 is off", type=number, metavar="X")
    add("presence_penalty", "on tokens generated; 0 is off", type=number, metavar="X")
    add("frequency_penalty", "per time generated; 0 is off", type=number, metavar="X")


def _add_sampling(parser: Parser) -> None:
    group = parser.add_argument_group("sampling")
    add = functools.partial(add_field, group, SamplingParams)
    add("max_tokens", "most tokens to generate", type=whole, metavar="N")
    add_distribution(group)
    add("min_tokens", "fewest tokens to generate before any stop", type=whole, metavar="N")
    add("bad_words", "never generate this text (repeatable)", action="append", metavar="TEXT")
    add("json_schema", "the output is JSON of this schema", metavar="JSON")
    add("regex", "the output matches this regular expression", metavar="REGEX")
    add("stop", "end before this text (repeatable)", action="append", metavar="TEXT")
    add("ignore_eos", "decode past the end of sequence", action="store_true")
    add("seed", "make sampling reproducible (default: random)", type=whole, metavar="N")
    add("namespace", "method suffix drafts only from outputs of this namespace", metavar="NAME")


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


def _add_generate(parser: Parser) -> None:
    group = parser.add_argument_group("prompts")
    group.add_argument("positional", nargs="?", metavar="PROMPT", help="a prompt")
    add_prompts(group)
    group.add_argument(
        "--chat", action="store_true", help="put prompts through the model's chat template"
    )
    group.add_argument(
        "--raw", dest="chat", action="store_false", help="complete prompts as they are (default)"
    )
    group = parser.add_argument_group("output")
    group.add_argument(
        "--compare", action="store_true", help="also run plain decoding and show both speeds"
    )
    group.add_argument(
        "--json", action="store_true", help="print one JSON object per prompt, one a line"
    )
    add_debug(group)
