"""The arguments of `convert`. Imports no JAX."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from spec_jax.cli.parser import Parser, add_debug
from spec_jax.config import CHECKPOINT_FORMATS, LLM_DTYPES, QUANTIZATIONS
from spec_jax.errors import ConfigError, did_you_mean


@dataclasses.dataclass(frozen=True)
class ConvertOptions:
    """What `convert` was asked to do.

    Attributes:
      source: the model's reference.
      output: the directory to write.
      layout: a layout file, or None.
      convert: further arguments of `checkpoints.convert`.
    """

    source: str
    output: str
    layout: str | None
    convert: dict[str, Any]


def parse_convert(arguments: Sequence[str]) -> ConvertOptions:
    """Parses and checks the arguments of `convert`.

    Raises:
      ConfigError: an argument is missing, unknown or malformed.
    """
    parser = Parser(
        "convert",
        "SRC --out DIR",
        "The model is read while it is written, some GiB at a time. DIR appears when it is "
        "complete, with the SHA-256 of every file, which loading compares. With --layout each "
        "process writes its own part, and DIR must be storage that all processes share.",
    )
    parser.add_argument("source", nargs="?", metavar="SRC", help="the model, as for --target")
    parser.add_argument(
        "output", nargs="?", metavar="DIR", help="the output, if it is not named with --out"
    )
    parser.add_argument(
        "--out", metavar="DIR", help="the directory to write, which does not exist yet"
    )
    parser.add_argument(
        "--format",
        metavar="|".join(CHECKPOINT_FORMATS),
        help="orbax is read in parts with any layout, safetensors by other programs, too "
        f"(default: {CHECKPOINT_FORMATS[0]})",
    )
    parser.add_argument(
        "--dtype",
        metavar="|".join(LLM_DTYPES),
        help="of the written weights; auto keeps every number, float16 as float32 (default: auto)",
    )
    parser.add_argument(
        "--quantization",
        metavar="|".join(QUANTIZATIONS),
        help="the bits that matrices are written in, with orbax: int8 and int4 round them, gguf "
        "keeps a .gguf file's own (default: auto, which keeps what an Orbax directory has)",
    )
    parser.add_argument(
        "--layout",
        metavar="FILE",
        help="how the model is sharded over several devices or processes while it is converted, "
        "one of sharding/*.toml (default: one device)",
    )
    add_debug(parser)
    given = parser.parse(arguments)
    outputs = [given[name] for name in ("output", "out") if given.get(name)]
    if not given.get("source"):
        raise ConfigError("no model given; write spec-jax convert SRC --out DIR.")
    if len(outputs) != 1:
        found = (
            f"the output is named twice, {' and '.join(outputs)}" if outputs else "no output given"
        )
        raise ConfigError(f"{found}; name the directory with --out.")
    known = {"format": CHECKPOINT_FORMATS, "dtype": LLM_DTYPES, "quantization": QUANTIZATIONS}
    for name, choices in known.items():
        if name in given and given[name] not in choices:
            raise ConfigError(f"{name} is {given[name]!r}.{did_you_mean(given[name], choices)}")
    convert = {name: given[name] for name in known if name in given}
    return ConvertOptions(given["source"], outputs[0], given.get("layout"), convert)
