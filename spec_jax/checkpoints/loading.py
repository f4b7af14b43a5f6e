"""Loads a model and its tokenizer, in whatever format they are stored."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

from spec_jax.checkpoints import draft_directory
from spec_jax.checkpoints.checkpoint import Checkpoint
from spec_jax.checkpoints.files import reading
from spec_jax.checkpoints.generation_config import sampling_settings
from spec_jax.checkpoints.hf_tokenizer import tokenizer_from_directory
from spec_jax.checkpoints.memory import check_weights_fit
from spec_jax.checkpoints.opening import Place, find, on_single_device, open_model, speech_tokens
from spec_jax.checkpoints.packing import Packing
from spec_jax.checkpoints.shape import hf_shape
from spec_jax.checkpoints.weights import ArrayWeights
from spec_jax.errors import ConfigError
from spec_jax.models.config import TransformerConfig
from spec_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class OpenCheckpoint:
    """A model in files, of which everything but the weights has been read.

    Attributes:
      name: its name in messages.
      config: its shape.
      tokenizer: text <-> token ids; None for a draft that has its target's.
      quantization: the format that its matrices will have.
    """

    name: str
    config: TransformerConfig
    tokenizer: Tokenizer | None
    quantization: str
    _load: Callable[[Checkpoint | None], Checkpoint]

    def load(self, target: Checkpoint | None = None) -> Checkpoint:
        """The model with its weights; for `target` and errors see the function `load`."""
        return self._load(target)


def load(
    reference: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    packing: Packing | None = None,
    place: Place = on_single_device,
    target: Checkpoint | None = None,
    on_progress: Callable[[str], object] | None = None,
) -> Checkpoint:
    """Loads a model and its tokenizer.

    Args:
      reference: a Hugging Face directory, a directory that `convert` wrote, a Whisper model's
        CTranslate2 directory, a .gguf file, a recipe (.toml), a folder or a .gguf file in a bucket
        (`gs://`, `s3://`), or a hub id `org/name[@revision]`. The last three download missing
        files.
      dtype: the dtype of weights that are not quantized: `float32`, `bfloat16`, or `auto` for the
        fastest dtype that keeps the stored values.
      packing: the form of matrices in memory; by default plain arrays.
      place: returns the placement of a model of this shape; by default one device.
      target: of a draft, the target that it may borrow weights from.
      on_progress: called with a line of text before each step that takes time.

    Raises:
      CheckpointError: it is missing, damaged, or its architecture is not supported.
      ConfigError: the dtype is unknown, quantization `gguf` is used with another format, rounded
        activations with a target that is not quantized, or the weights do not fit into memory; no
        weights were read.
      DisagreementError: the processes of a run would not load the same files.
    """
    is_draft = target is not None
    return open_checkpoint(
        reference,
        dtype=dtype,
        packing=packing,
        place=place,
        is_draft=is_draft,
        on_progress=on_progress,
    ).load(target)


def open_checkpoint(
    reference: str | os.PathLike[str],
    *,
    dtype: str,
    packing: Packing | None,
    place: Place,
    is_draft: bool,
    on_progress: Callable[[str], object] | None,
) -> OpenCheckpoint:
    """Reads everything of a model but its weights; see `load`.

    Args:
      reference: see `load`.
      dtype: see `load`.
      packing: see `load`.
      place: see `load`.
      is_draft: it drafts for a target, with which it is loaded.
      on_progress: see `load`.
    """
    progress = on_progress or (lambda line: None)
    name, path, packing = find(
        reference, dtype, packing, by_itself=not is_draft, on_progress=on_progress
    )
    with reading(path):
        if (path / draft_directory.MANIFEST).is_file():
            return _open_draft(name, path, dtype, packing, place, progress)
        stored = open_model(path, dtype, packing, place)
        speech, sampling = speech_tokens(name, path, stored), sampling_settings(path)
    if packing.activations == "int8" and not is_draft and stored.packing.quantization == "none":
        raise ConfigError(
            f"activations is 'int8', but {name} is not quantized; use float32, or quantization "
            "int8 or int4."
        )

    def load(target: Checkpoint | None) -> Checkpoint:
        progress(f"loading {name}")
        with reading(path):
            if not isinstance(stored.weights, ArrayWeights):  # random ones are in memory already
                check_weights_fit(name, stored.weights.leaves, stored.packing)
            return Checkpoint(
                stored.load(),
                stored.tokenizer,
                stored.tokenizer.eos_token_ids,
                name,
                quantization=stored.packing.quantization,
                speech=speech,
                sampling=sampling,
            )

    return OpenCheckpoint(name, stored.config, stored.tokenizer, stored.packing.quantization, load)


def _open_draft(
    name: str,
    path: Path,
    dtype: str,
    packing: Packing,
    place: Place,
    progress: Callable[[str], object],
) -> OpenCheckpoint:
    """A draft that was trained for one target."""
    has_tokenizer = (path / "tokenizer.json").is_file()
    tokenizer = tokenizer_from_directory(path) if has_tokenizer else None

    def load(target: Checkpoint | None) -> Checkpoint:
        progress(f"loading {name}")
        with reading(path):
            model, form, outputs = draft_directory.load_draft(path, dtype, packing, place, target)
        mine = tokenizer or (target.tokenizer if target else tokenizer_from_directory(path))
        return Checkpoint(model, mine, mine.eos_token_ids, name, outputs, form.quantization)

    return OpenCheckpoint(name, hf_shape(path)[1], tokenizer, packing.quantization, load)
