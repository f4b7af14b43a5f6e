"""The flags of `spec-jax compile`. Imports no JAX."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from spec_jax.cli.arguments import add_speculation, speculation_of
from spec_jax.cli.model_arguments import SHAPE_DTYPE, add_caches, add_shape, require_shape
from spec_jax.cli.parser import Parser, add_debug, add_field, fields_of, whole, wholes
from spec_jax.cli.sampling_arguments import add_distribution
from spec_jax.config import SamplingParams, SpeculativeConfig
from spec_jax.errors import ConfigError

FOLDER = "JAX_COMPILATION_CACHE_DIR"
_EPILOG = f"""\
Set {FOLDER} to DIR where `generate` or LLM runs, with
the same models, options and layout, and the same versions of spec-jax, jax, jaxlib and libtpu;
it then reads the programs instead of compiling them. No weights are read here, and no TPU is
needed, but the extra tpu. Layouts of GPUs compile in the first job.

Lengths are rounded up to powers of two: those of one power share their programs. LLM's own
--dtype depends on what is stored, so give it there too.
"""


@dataclasses.dataclass(frozen=True)
class CompileOptions:
    """What `compile` was asked to do.

    Attributes:
      target: the target's reference.
      layout: a layout file.
      speculative: how to draft and verify.
      sampling: how requests are sampled, and how long they become.
      output: the folder of the programs.
      prompt_tokens: of the longest prompt; each value is a workload of its own.
      num_prompts: given to one call.
      max_num_seqs: most of them decoded at once.
      max_model_len: most tokens of prompt and completion together; None is the target's context.
      dtype: of weights and caches.
      quantization: of the matrices of both models.
      kv_cache_dtype: of keys and values.
    """

    target: str
    layout: str
    speculative: SpeculativeConfig
    sampling: SamplingParams
    output: Path
    prompt_tokens: tuple[int, ...]
    num_prompts: int = 1
    max_num_seqs: int = 8
    max_model_len: int | None = None
    dtype: str = SHAPE_DTYPE
    quantization: str = "none"
    kv_cache_dtype: str = "auto"


def parse_compile(arguments: Sequence[str]) -> CompileOptions:
    """Parses and checks the arguments of `compile`.

    Raises:
      ConfigError: an argument is missing, unknown, malformed or out of range.
    """
    given = _parser().parse(arguments)
    require_shape(given)
    if not given.get("prompt_tokens"):
        raise ConfigError(
            "no prompt tokens given; name the tokens of your prompts with --prompt-tokens, such as "
            "128,512."
        )
    folder = given.get("out") or os.environ.get(FOLDER)
    if not folder:
        raise ConfigError(f"no folder given; name the programs' with --out, or set {FOLDER}.")
    for name in ("num_prompts", "max_num_seqs", "max_model_len"):
        if given.get(name, 1) < 1:
            raise ConfigError(f"{name} is {given[name]}; give at least 1.")
    if min(given["prompt_tokens"]) < 1:
        raise ConfigError(f"prompt_tokens is {min(given['prompt_tokens'])}; give at least 1.")
    return CompileOptions(
        speculative=speculation_of(given),
        sampling=SamplingParams(**fields_of(SamplingParams, given)),
        output=Path(folder),
        **{
            field.name: given[field.name]
            for field in dataclasses.fields(CompileOptions)
            if field.name in given
        },
    )


def _parser() -> Parser:
    parser = Parser("compile", "--target REF --layout FILE", _EPILOG)
    group = parser.add_argument_group("model")
    add_shape(group)
    add_caches(group)
    add_speculation(parser)
    group = parser.add_argument_group("what will be decoded")
    group.add_argument(
        "--prompt-tokens",
        type=wholes,
        metavar="N,N,...",
        help="tokens of the longest prompt; each number is compiled for",
    )
    group.add_argument(
        "--num-prompts", type=whole, metavar="N", help="prompts of one call (default: 1)"
    )
    group.add_argument(
        "--max-num-seqs",
        type=whole,
        metavar="N",
        help="most prompts decoded as one batch (default: 8)",
    )
    add_field(
        group, SamplingParams, "max_tokens", "most tokens to generate", type=whole, metavar="N"
    )
    add_distribution(group)
    group = parser.add_argument_group("output")
    group.add_argument(
        "--out", metavar="DIR", help=f"the folder of the programs (default: that of {FOLDER})"
    )
    add_debug(group)
    return parser
