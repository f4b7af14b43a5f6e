"""The flags of `spec-jax audit`. Imports no JAX."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from spec_jax.cli.arguments import (
    Options,
    add_prompts,
    add_speculation,
    refuse_greedy_sampling,
    speculation_of,
)
from spec_jax.cli.model_arguments import LLM_OPTIONS, add_model, require_target
from spec_jax.cli.parser import Parser, add_debug, fields_of, whole
from spec_jax.cli.sampling_arguments import add_distribution
from spec_jax.config import LLM_DTYPES, SamplingParams, SpeculativeConfig
from spec_jax.errors import ConfigError

MAX_TOKENS = 32
TEMPERATURE = 1.0
LOOKAHEAD = 4
"""K of an audit: drafts of this length are accepted whole and refused often enough to be tested."""

_EPILOG = """\
Four things are checked: greedy tokens are those of plain decoding, stop tokens inside accepted
blocks and penalties included; sampled tokens follow the target's distribution, computed without
speculation and without the library's own sampling code; drafted tokens follow the probabilities
that their drafter reports; and a row's tokens do not depend on its batch, nor on when it joins one.
A check that sees nothing, such as one of rejections if nothing is rejected, is "NOT TESTED".

The exit code is 1 if a check fails, and 3 if one that should see something does not. A lossless
method fails one audit in a thousand by chance.
"""


@dataclasses.dataclass(frozen=True)
class AuditOptions(Options):
    """What `audit` was asked to do.

    Attributes:
      samples: rows sampled of each setting; None leaves it to the model's size.
      max_tokens: tokens decoded greedily from each prompt.
      seed: of the sampled rows.
      settings: name -> how to sample; None for the default settings.
      allow_untested: whether a check may see nothing.
    """

    samples: int | None = None
    max_tokens: int = MAX_TOKENS
    seed: int = 0
    settings: dict[str, SamplingParams] | None = None
    allow_untested: bool = False


def parse_audit(arguments: Sequence[str]) -> AuditOptions:
    """Parses and checks the arguments of `audit`.

    Raises:
      ConfigError: an argument is unknown, malformed or out of range, or two contradict each other.
    """
    parser = Parser("audit", "--target REF", _EPILOG)
    add_model(parser)
    add_speculation(parser, str(LOOKAHEAD))
    group = parser.add_argument_group(
        "sampling",
        "Without these there are two settings: temperature 1, and temperature 0.7 with top-p 0.9 "
        "and a repetition penalty of 1.2. With any of them there is one, with these defaults; at "
        "temperature 0 only the greedy checks run.",
    )
    add_distribution(group, temperature=TEMPERATURE)
    group = parser.add_argument_group(
        "what to look at",
        "Without prompts the audit takes three of its own: those that show most of the method.",
    )
    add_prompts(group)
    group.add_argument(
        "--samples",
        type=whole,
        metavar="N",
        help="rows sampled for each setting; more find smaller deviations (default: 4096, or 512 "
        "for a model of ten million parameters or more)",
    )
    group.add_argument(
        "--max-tokens",
        type=whole,
        metavar="N",
        help=f"tokens decoded greedily from each prompt (default: {MAX_TOKENS})",
    )
    group.add_argument(
        "--seed", type=whole, metavar="N", help="another seed samples other rows (default: 0)"
    )
    group.add_argument(
        "--allow-untested",
        action="store_true",
        help="exit with 0 even if a check saw nothing (default: with 3)",
    )
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object")
    add_debug(group)
    given = parser.parse(arguments)
    require_target(given, LLM_DTYPES)
    own = {name: given.pop(name) for name in ("samples", "max_tokens", "seed") if name in given}
    for name, least in (("samples", 1), ("max_tokens", 1), ("max_model_len", 1), ("seed", 0)):
        if (value := (given | own).get(name, least)) < least:
            raise ConfigError(f"{name} is {value}; give at least {least}.")
    asked = fields_of(SamplingParams, given)
    if asked:
        asked.setdefault("temperature", TEMPERATURE)
    sampling = SamplingParams(**asked)
    settings = {"as given": sampling} if sampling.temperature else {}
    options = AuditOptions(
        target=given["target"],
        speculative=_speculation(given),
        sampling=sampling,
        llm={name: given[name] for name in LLM_OPTIONS if name in given},
        sources=tuple(given.get("sources", ())),
        json="json" in given,
        settings=settings if asked else None,
        allow_untested="allow_untested" in given,
        **own,
    )
    refuse_greedy_sampling(options)
    return options


def _speculation(given: dict[str, Any]) -> SpeculativeConfig:
    """How to draft and verify, with the audit's own K where none is given and any is taken."""
    config = speculation_of(given)
    takes_one = config.method != "none"
    if config.num_speculative_tokens is not None or not takes_one:
        return config
    return dataclasses.replace(config, num_speculative_tokens=LOOKAHEAD)
