"""The flags of `spec-jax train-draft`. Imports no JAX."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spec_jax.cli.model_arguments import add_reference, require_target
from spec_jax.cli.parser import (
    Parser,
    add_debug,
    add_field,
    fields_of,
    number,
    numbers,
    whole,
    wholes,
)
from spec_jax.errors import ConfigError
from spec_jax.training.config import TrainingConfig

LICENSE = "LicenseRef-unspecified"

_EPILOG = """\
Data: a .jsonl file holds one object per line with a key "messages" (the target answers the last
question), "prompt" (the target continues it) or "text" (read as it is); any other file is one text.
Without --data the target generates its own prompts.

DIR holds the run: data/, checkpoints/, metrics.jsonl, acceptance.png and at the end draft/ and
draft.toml, which you pass as --draft. The same command resumes an interrupted run.
"""


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """What `train-draft` was asked to do.

    Attributes:
      target: the target's reference.
      output: the run's directory.
      data: data files, in order.
      data_dir: where rows are kept, or None.
      layout: a layout file, or None.
      config: what to train and how.
      license: the SPDX expression of the draft's weights.
      arguments: the arguments as they were given.
    """

    target: str
    output: Path
    data: tuple[Path, ...]
    data_dir: Path | None
    layout: str | None
    config: TrainingConfig
    license: str
    arguments: tuple[str, ...]


def parse_train(arguments: Sequence[str]) -> TrainOptions:
    """Parses and checks the arguments of `train-draft`.

    Raises:
      ConfigError: an argument is unknown, malformed or out of range, or two contradict each other.
    """
    parser = Parser("train-draft", "--target REF --out DIR", _EPILOG)
    group = parser.add_argument_group("model")
    add_reference(group)
    group.add_argument("--out", type=Path, metavar="DIR", help="the run's directory")

    def add(group: Any, name: str, help: str, **how: Any) -> None:
        add_field(group, TrainingConfig, name, help, **how)

    group = parser.add_argument_group("draft")
    add(group, "layers", "layers of the draft", type=whole, metavar="N")
    group.add_argument(
        "--from-layers",
        type=wholes,
        metavar="I,J",
        help="layers of the target that it is initialised from (default: evenly spaced)",
    )
    add(group, "width", "its width (default: the target's)", type=whole, metavar="N")
    add(group, "embedding", "whose embedding and head", metavar="shared|own")
    add(group, "reduced_vocab", "tokens that it can propose", type=whole, metavar="N")
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data", action="append", type=Path, metavar="FILE", help="see below (repeatable)"
    )
    group.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="where sampled rows are kept; runs can share them (default: data in the run's)",
    )
    add(group, "sample_tokens", "tokens to sample from the target", type=whole, metavar="N")
    add(group, "temperatures", "sampling temperatures, in turn", type=numbers, metavar="T,U")
    add(group, "sequence_length", "tokens per row, prompt included", type=whole, metavar="N")
    add(group, "sample_batch", "rows sampled at once", type=whole, metavar="N")
    add(group, "held_out", "prompts kept for evaluation", type=whole, metavar="N")
    add(group, "max_disk", "most gigabytes of data", type=number, metavar="GB")
    group = parser.add_argument_group("training")
    add(group, "objective", "the loss to minimise", metavar="kl|tv|ce")
    add(group, "steps", "updates", type=whole, metavar="N")
    add(group, "batch_size", "rows per update", type=whole, metavar="N")
    add(group, "accumulate", "micro-batches per update", type=whole, metavar="N")
    add(group, "learning_rate", "peak learning rate", type=number, metavar="X")
    add(group, "warmup_steps", "updates until the peak", type=whole, metavar="N")
    add(group, "weight_decay", "of AdamW", type=number, metavar="X")
    add(group, "clip", "largest norm of a gradient", type=number, metavar="X")
    add(group, "evaluate_every", "updates between evaluations", type=whole, metavar="N")
    add(group, "seed", "of samples and order", type=whole, metavar="N")
    group = parser.add_argument_group("output")
    group.add_argument(
        "--license",
        metavar="SPDX",
        help="the licence of the draft's weights, for its recipe and card; the target's licence "
        f"may restrict it (default: {LICENSE})",
    )
    add_debug(group)
    given = parser.parse(arguments)
    require_target(given)
    if not given.get("out"):
        raise ConfigError("no output given; name the run's directory with --out.")
    return TrainOptions(
        target=given["target"],
        output=given["out"],
        data=tuple(given.get("data", ())),
        data_dir=given.get("data_dir"),
        layout=given.get("layout"),
        config=TrainingConfig(**fields_of(TrainingConfig, given)),
        license=given.get("license", LICENSE),
        arguments=tuple(arguments),
    )
