"""The flags of `spec-jax transcribe`. Imports no JAX."""

import dataclasses
from collections.abc import Sequence

from spec_jax.cli.arguments import Options, add_speculation, refuse_greedy_sampling, speculation_of
from spec_jax.cli.model_arguments import LLM_OPTIONS, add_model, require_target
from spec_jax.cli.parser import Parser, add_debug, fields_of, whole
from spec_jax.cli.sampling_arguments import add_distribution
from spec_jax.config import LLM_DTYPES, SamplingParams
from spec_jax.errors import ConfigError

_EPILOG = """\
A sound is read in windows of 30 seconds; several sounds are decoded together. Formats are those of
libsndfile, such as WAV, FLAC, OGG and MP3.

--json prints, for each sound, the keys text, language, seconds, segments and windows, each of which
is a completion as `spec-jax generate --json` prints it.
"""


@dataclasses.dataclass(frozen=True)
class TranscribeOptions(Options):
    """What `transcribe` was asked to do.

    Attributes:
      sounds: paths of sound files.
      language: that is spoken; None if the model is to tell it.
      task: `transcribe` or `translate`.
      timestamps: whether segments have times.
    """

    sounds: tuple[str, ...] = ()
    language: str | None = None
    task: str = "transcribe"
    timestamps: bool = False


def parse_transcribe(arguments: Sequence[str]) -> TranscribeOptions:
    """Parses and checks the arguments of `transcribe`.

    Raises:
      ConfigError: an argument is unknown, malformed or out of range, or two contradict each other.
    """
    parser = Parser("transcribe", "SOUND... --target REF", _EPILOG)
    parser.add_argument("sounds", nargs="*", metavar="SOUND", help="a sound file")
    group = add_model(parser)
    group.add_argument(
        "--max-num-seqs", type=whole, metavar="N", help="most sounds decoded at once (default: 8)"
    )
    add_speculation(parser)
    group = parser.add_argument_group("what to write down")
    group.add_argument(
        "--language",
        metavar="CODE",
        help="the language that is spoken, such as de (default: the model tells it)",
    )
    group.add_argument(
        "--task",
        metavar="transcribe|translate",
        help="translate writes English (default: transcribe)",
    )
    group.add_argument("--timestamps", action="store_true", help="say when each segment was said")
    group.add_argument("--json", action="store_true", help="print one JSON object for each sound")
    add_debug(group)
    add_distribution(parser.add_argument_group("sampling"))
    given = parser.parse(arguments)
    require_target(given, LLM_DTYPES)
    if not given.get("sounds"):
        raise ConfigError("no sound given; name one or several sound files.")
    if given.get("max_num_seqs", 1) < 1:
        raise ConfigError(f"max_num_seqs is {given['max_num_seqs']}; give at least 1.")
    own = {name: given[name] for name in ("language", "task", "timestamps") if name in given}
    options = TranscribeOptions(
        target=given["target"],
        speculative=speculation_of(given),
        sampling=SamplingParams(**fields_of(SamplingParams, given)),
        llm={name: given[name] for name in (*LLM_OPTIONS, "max_num_seqs") if name in given},
        json="json" in given,
        sounds=tuple(given["sounds"]),
        **own,
    )
    refuse_greedy_sampling(options)
    return options
