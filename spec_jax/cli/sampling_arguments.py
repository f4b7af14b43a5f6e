"""The flags of `SamplingParams`. Imports no JAX."""

import argparse
import functools
from typing import Any

from spec_jax.cli.parser import Parser, add_field, fields_of, number, whole
from spec_jax.config import SamplingParams, StructuredOutputsParams

_FORMS = {"json_schema": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}
"""Flags, and what they are called in `StructuredOutputsParams`."""


def sampling_of(given: dict[str, Any]) -> SamplingParams:
    """How to sample."""
    forms = {ours: given[flag] for flag, ours in _FORMS.items() if flag in given}
    wanted = StructuredOutputsParams(**forms) if forms else None
    return SamplingParams(**fields_of(SamplingParams, given), structured_outputs=wanted)


def add_distribution(group: Any, temperature: float | None = None) -> None:
    """The flags that decide what the next token's distribution is.

    `temperature` is the command's default; that of `SamplingParams` if None.
    """
    add = functools.partial(add_field, group, SamplingParams)
    add("temperature", "0 is greedy", temperature, type=number, metavar="T")
    add("top_k", "keep the K likeliest tokens; 0 keeps all", type=whole, metavar="K")
    add("top_p", "keep the likeliest tokens that reach probability P", type=number, metavar="P")
    add("min_p", "drop tokens below P times the likeliest", type=number, metavar="P")
    add("repetition_penalty", "on tokens seen; 1 is off", type=number, metavar="X")
    add("presence_penalty", "on tokens generated; 0 is off", type=number, metavar="X")
    add("frequency_penalty", "per time generated; 0 is off", type=number, metavar="X")


def add_sampling(parser: Parser, max_tokens: str | None = None) -> None:
    """The flags of `SamplingParams`, but for what only JSON can show.

    `max_tokens` is the command's default, in words; that of `SamplingParams` if None.
    """
    group = parser.add_argument_group("sampling")
    add = functools.partial(add_field, group, SamplingParams)
    add("max_tokens", "most tokens to generate", max_tokens, type=whole, metavar="N")
    add_distribution(group)
    add("min_tokens", "fewest tokens to generate before any stop", type=whole, metavar="N")
    add("bad_words", "never generate this text (repeatable)", action="append", metavar="TEXT")
    add_form = functools.partial(add_field, group, StructuredOutputsParams)
    group.add_argument("--json-schema", help="the output is JSON of this schema", metavar="JSON")
    add_form("regex", "the output matches this regular expression", metavar="REGEX")
    add_form("choice", "the output is this text (repeatable)", action="append", metavar="TEXT")
    add_form("grammar", "the output is of this grammar, in Lark's syntax or GBNF", metavar="TEXT")
    add("stop", "end before this text (repeatable)", action="append", metavar="TEXT")
    add("stop_token_ids", "end after one of these tokens", type=_several, metavar="N,N,...")
    add("ignore_eos", "decode past the end of sequence", action="store_true")
    add("seed", "make sampling reproducible (default: random)", type=whole, metavar="N")
    add("namespace", "method suffix drafts only from outputs of this namespace", metavar="NAME")


def _several(text: str) -> list[int]:
    """Whole numbers with commas between them, for `type=`."""
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} are not whole numbers, like 2,7") from None
