"""Loads a model and its tokenizer, in whatever format they are stored."""

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
from spec_jax.checkpoints.weights import ArrayWeights
from spec_jax.errors import ConfigError


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
    name, path, packing = find(
        reference, dtype, packing, by_itself=target is None, on_progress=on_progress
    )
    with reading(path):
        if (path / draft_directory.MANIFEST).is_file():
            return _load_draft(name, path, dtype, packing, place, target)
        stored = open_model(path, dtype, packing, place)
        rounds_activations = packing.activations == "int8"
        if rounds_activations and target is None and stored.packing.quantization == "none":
            raise ConfigError(
                f"activations is 'int8', but {name} is not quantized; use float32, or quantization "
                "int8 or int4."
            )
        if not isinstance(stored.weights, ArrayWeights):  # random weights are in memory already
            check_weights_fit(name, stored.weights.leaves, stored.packing)
        model = stored.load()
        speech, sampling = speech_tokens(name, path, stored), sampling_settings(path)
    return Checkpoint(
        model,
        stored.tokenizer,
        stored.tokenizer.eos_token_ids,
        name,
        quantization=stored.packing.quantization,
        speech=speech,
        sampling=sampling,
    )


def _load_draft(
    name: str,
    path: Path,
    dtype: str,
    packing: Packing,
    place: Place,
    target: Checkpoint | None,
) -> Checkpoint:
    model, packing, outputs = draft_directory.load_draft(path, dtype, packing, place, target)
    if target is not None and not (path / "tokenizer.json").is_file():
        tokenizer = target.tokenizer
    else:
        tokenizer = tokenizer_from_directory(path)
    return Checkpoint(
        model, tokenizer, tokenizer.eos_token_ids, name, outputs, packing.quantization
    )
