"""Writes a trained draft: its own weights, a copy with all weights, a recipe and a model card."""

import dataclasses
import re
import tempfile
import unicodedata
from pathlib import Path

import jax

from spec_jax.checkpoints import Checkpoint
from spec_jax.checkpoints.draft_directory import write_draft
from spec_jax.checkpoints.hf_writer import write_model, write_tokenizer
from spec_jax.checkpoints.recipe import Recipe
from spec_jax.errors import CheckpointError, ConfigError, extra
from spec_jax.training.config import TrainingConfig
from spec_jax.training.draft import BORROWED, untrained_draft
from spec_jax.training.run import TrainedDraft
from spec_jax.training.store import replace_text

with extra("train"):
    import tomli_w

DRAFT, WHOLE, RECIPE = "draft", "draft-whole", "draft.toml"


@dataclasses.dataclass(frozen=True)
class Provenance:
    """The origin of a draft, for its card.

    Attributes:
      target: the target's name.
      command: the command that trained it.
      data: a description of its training data.
      license: the weights' SPDX expression.
    """

    target: str
    command: str
    data: str
    license: str


def export(
    path: Path,
    trained: TrainedDraft,
    target: Checkpoint,
    config: TrainingConfig,
    provenance: Provenance,
    dtype: str = "bfloat16",
) -> None:
    """Writes `draft/` with the draft's own weights, and `draft.toml`, its recipe.

    A draft that shares the target's embedding and head is also written with all weights and all of
    the target's outputs to `draft-whole/`, a Hugging Face directory that other programs can read.

    Args:
      path: the run's directory.
      trained: the draft.
      target: the target that it was trained for.
      config: its training.
      provenance: its origin, for the card.
      dtype: the dtype of the written weights.
    """
    model, shared = trained.model, config.embedding == "shared"
    borrowed = tuple(name for name in model.weights if shared and name.startswith(BORROWED))
    write_draft(path / DRAFT, model, target, dtype, outputs=trained.outputs, borrowed=borrowed)
    if shared:
        trained_weights = {
            name: weight for name, weight in model.weights.items() if name not in borrowed
        }
        complete = untrained_draft(target.model, config, None, model.placement)
        write_model(path / WHOLE, complete.with_weights(trained_weights), dtype)
        write_tokenizer(path / WHOLE, target.tokenizer)
    if jax.process_index() == 0:
        replace_text(path / DRAFT / "README.md", card(trained, config, provenance))
        _write_recipe(path, provenance)


def check_recipe(provenance: Provenance) -> None:
    """Writes a draft's recipe and reads it back, before there is a draft.

    Raises:
      ConfigError: it cannot be read.
    """
    with tempfile.TemporaryDirectory() as scratch:
        try:
            _write_recipe(Path(scratch), provenance)
        except (CheckpointError, UnicodeEncodeError):
            raise ConfigError(
                f"license is {provenance.license!r}, which no recipe can hold; give an SPDX "
                "expression such as Apache-2.0."
            ) from None


def _write_recipe(path: Path, provenance: Provenance) -> None:
    # A recipe's name has fewer characters to choose from than a directory's.
    name = unicodedata.normalize("NFKD", provenance.target).encode("ascii", "ignore").decode()
    name = re.sub(r"[^\w.-]+", "-", name).strip("-._")
    recipe = {
        "name": f"{name}-draft" if name else "draft",
        "license": provenance.license,
        "source": {"path": DRAFT},
    }
    replace_text(path / RECIPE, tomli_w.dumps(recipe))
    Recipe.read(path / RECIPE)


def card(trained: TrainedDraft, config: TrainingConfig, provenance: Provenance) -> str:
    """The model card."""
    proposes = "all tokens" if trained.outputs is None else f"{len(trained.outputs)} tokens"
    num_parameters = sum(
        weight.size
        for name, weight in trained.model.weights.items()
        if config.embedding == "own" or not name.startswith(BORROWED)
    )
    lends = "its embedding and head" if config.embedding == "shared" else "nothing"
    text = f"""\
# A draft for {provenance.target}

It drafts for {provenance.target}, which lends it {lends}, in speculative decoding with spec-jax:

    spec-jax generate --target TARGET --draft {RECIPE} --chat "..."

| | |
| --- | --- |
| layers | {config.layers} |
| own parameters | {num_parameters / 1e6:.1f} million |
| proposes | {proposes} |
| learnt from | {trained.num_tokens / 1e6:.2f} million tokens: {provenance.data} |
| objective | {config.objective} |
| updates | {trained.step} of {config.batch_size} rows of at most {config.sequence_length} tokens |
| acceptance, greedy | {trained.acceptance["greedy"]:.3f} |
| acceptance, temperature 1 | {trained.acceptance["sampled"]:.3f} |

Acceptance is the rate at which one drafted token is kept, on the target's answers to held-out
prompts. It was trained by

    {provenance.command}
"""
    return text.encode(errors="backslashreplace").decode()  # names of files may not be UTF-8
