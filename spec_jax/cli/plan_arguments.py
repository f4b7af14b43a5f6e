"""The flags of `spec-jax plan`. Imports no JAX."""

import dataclasses
from collections.abc import Sequence

from spec_jax.cli.model_arguments import SHAPE_DTYPE, add_shape, require_shape
from spec_jax.cli.parser import Parser, add_debug, names, number, whole, wholes
from spec_jax.config import OFFLOADS, SamplingParams
from spec_jax.errors import ConfigError

ACCEPTANCE, LOOKAHEAD = 0.8, 4


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """What `plan` was asked to do.

    Attributes:
      target: the target's reference.
      layout: a layout file.
      draft: the draft's reference; None plans one that is derived from the target.
      compile: ask the compiler.
      search: try many batches, draft layouts and K instead of planning one.
      out: with `search`, the layout file to write.
      json: print one JSON object.
      num_speculative_tokens: draft tokens of a round (K); several only with `search`, as with the
        next two and `quantization`. Empty takes the default.
      batch: rows decoded together.
      context: longest prompt and completion together.
      acceptance: the probability that a draft token is accepted.
      temperature: of sampling; 0 is greedy.
      top_k: of sampling; 0 keeps all tokens.
      top_p: of sampling.
      dtype: of weights and caches.
      quantization: of matrices.
      offload: `host` streams the target's blocks from host memory.
      resident_layers: how many of them stay on the chips.
    """

    target: str
    layout: str
    draft: str | None = None
    compile: bool = False
    search: bool = False
    out: str | None = None
    json: bool = False
    num_speculative_tokens: tuple[int, ...] = ()
    batch: tuple[int, ...] = ()
    context: tuple[int, ...] = ()
    acceptance: float = ACCEPTANCE
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    dtype: str = SHAPE_DTYPE
    quantization: tuple[str, ...] = ("none",)
    offload: str = "none"
    resident_layers: int = 0

    @property
    def sampling(self) -> SamplingParams:
        """How rows sample."""
        return SamplingParams(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)


def parse_plan(arguments: Sequence[str]) -> PlanOptions:
    """Parses and checks the arguments of `plan`.

    Raises:
      ConfigError: an argument is missing, unknown, malformed or out of range.
    """
    parser = Parser(
        "plan",
        "--target REF --layout FILE",
        "Every time is a projection from the layout's figures of the chip: the least time that "
        "memory,\narithmetic and links take. No weights are read, and no accelerator is needed.",
    )
    group = parser.add_argument_group("models")
    add_shape(group, quantization=names)
    group.add_argument(
        "--draft",
        metavar="REF",
        help="draft model, named like the target (default: one derived from the target, much "
        "shallower and slightly narrower)",
    )
    group.add_argument(
        "--offload",
        metavar="|".join(OFFLOADS),
        help="host keeps the target's layers in host memory and streams them in every call "
        "(default: none)",
    )
    group.add_argument(
        "--resident-layers",
        type=whole,
        metavar="N",
        help="with --offload host, layers that stay on the chips (default: 0)",
    )
    group = parser.add_argument_group("what to plan for")
    group.add_argument(
        "--num-speculative-tokens",
        type=wholes,
        metavar="K",
        help=f"tokens drafted in a round (default: {LOOKAHEAD}; with --search, 1 to 16)",
    )
    group.add_argument(
        "--acceptance",
        type=number,
        metavar="A",
        help=f"probability that a drafted token is accepted (default: {ACCEPTANCE})",
    )
    group.add_argument(
        "--batch",
        type=wholes,
        metavar="N",
        help="rows decoded together (default: 1; with --search, doubled until nothing fits)",
    )
    group.add_argument(
        "--context",
        type=wholes,
        metavar="N",
        help="most tokens of prompt and completion together (default: the target's context)",
    )
    sampled = "it adds exchanges to a round (default: greedy)"
    group.add_argument("--temperature", type=number, metavar="T", help=f"of sampling; {sampled}")
    group.add_argument("--top-k", type=whole, metavar="N", help="of sampling (default: all)")
    group.add_argument("--top-p", type=number, metavar="P", help="of sampling (default: 1)")
    group = parser.add_argument_group("output")
    group.add_argument(
        "--compile",
        action="store_true",
        help="compile for the layout and show what the compiler reports; for a TPU layout this "
        "needs the extra tpu but no TPU",
    )
    group.add_argument(
        "--search",
        action="store_true",
        help="try batches, layouts of the draft and K, and show the fastest that fit; --batch, "
        "--context, --quantization and --num-speculative-tokens then take lists such as 1,8,64",
    )
    group.add_argument(
        "--out", metavar="FILE", help="with --search, write the layout of its first row"
    )
    group.add_argument("--json", action="store_true", help="print one JSON object")
    add_debug(group)
    given = parser.parse(arguments)
    given.pop("debug", None)
    require_shape(given)
    options = PlanOptions(**given)
    for name in ("num_speculative_tokens", "batch", "context"):
        if any((least := value) < 1 for value in getattr(options, name)):
            raise ConfigError(f"{name} is {least}; give at least 1.")
    _check_search(options)
    if not 0 <= options.acceptance <= 1:
        raise ConfigError(f"acceptance is {options.acceptance}; give a probability in [0, 1].")
    _ = options.sampling  # refuses what is out of range
    return options


def _check_search(options: PlanOptions) -> None:
    """Refuses what needs a search without one, and the reverse."""
    if not options.search:
        for name in ("num_speculative_tokens", "batch", "context", "quantization"):
            if len(values := getattr(options, name)) > 1:
                given = ",".join(map(str, values))
                raise ConfigError(f"{name} is {given}; give one value, or add --search.")
        if options.out is not None:
            raise ConfigError(f"out is {options.out!r}, which --search writes; add --search.")
    elif options.compile or options.offload != "none":
        name = "--compile" if options.compile else "--offload"
        raise ConfigError(f"--search does without {name}; leave one of them out.")
