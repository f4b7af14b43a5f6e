"""Models from files: Hugging Face directories, GGUF files, recipes and the hub.

Weights are read from safetensors and GGUF only. Nothing is unpickled, and no code that comes
with a checkpoint is run.
"""

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from spec_jax import distributed
from spec_jax.checkpoints import ctranslate2_directory, draft_directory
from spec_jax.checkpoints.byte_tokenizer import byte_tokenizer
from spec_jax.checkpoints.ctranslate2_directory import Ctranslate2Directory
from spec_jax.checkpoints.files import fingerprint, read_json
from spec_jax.checkpoints.gguf_file import GgufFile
from spec_jax.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from spec_jax.checkpoints.hf_tokenizer import tokenizer_from_directory
from spec_jax.checkpoints.orbax_directory import MANIFEST, load_directory, save_directory
from spec_jax.checkpoints.packing import Packing
from spec_jax.checkpoints.recipe import Recipe
from spec_jax.checkpoints.reference import locate
from spec_jax.checkpoints.safetensors_files import SafetensorsFiles
from spec_jax.checkpoints.weights import build_model, pack_model
from spec_jax.config import LLM_DTYPES
from spec_jax.errors import CheckpointError, ConfigError
from spec_jax.models import whisper
from spec_jax.models.config import TransformerConfig
from spec_jax.models.model import Model
from spec_jax.models.registry import family_of_gguf, family_of_hf
from spec_jax.sharding import Placement
from spec_jax.text.speech import SpeechTokens
from spec_jax.text.tokenizer import Tokenizer

__all__ = ["Checkpoint", "load", "locate", "save"]


@dataclass(frozen=True)
class Checkpoint:
    """A model that is ready to run.

    Attributes:
      model: the weights and their shape.
      tokenizer: text <-> token ids.
      eos_token_ids: tokens that end a generation.
      name: its name in messages.
      outputs: the target's ids that a draft trained for it can propose; None for all.
      quantization: how its matrices are kept: `none`, `int8`, `int4` or `gguf`.
      speech: the special tokens of a model that reads speech; None for others.
    """

    model: Model
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    name: str
    outputs: np.ndarray | None = None
    quantization: str = "none"
    speech: SpeechTokens | None = None


_Place = Callable[[TransformerConfig], Placement | None]
_Read = tuple[Model, Tokenizer, Packing]


def load(
    reference: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    packing: Packing | None = None,
    place: _Place | None = None,
    target: Checkpoint | None = None,
    on_progress: Callable[[str], object] | None = None,
) -> Checkpoint:
    """Loads a model and its tokenizer.

    Args:
      reference: a Hugging Face directory, one that `save` wrote, CTranslate2's of a Whisper model,
        a .gguf file, a recipe (.toml), or a hub id `org/name[@revision]`; the last two fetch what
        is not yet on this machine.
      dtype: `float32` or `bfloat16`, to which all weights that are not quantized are converted,
        or `auto` for the fastest that keeps what is stored.
      packing: how matrices are kept; by default as plain arrays.
      place: returns the placement of a model of this shape on a mesh; by default one device.
      target: for a draft, the target that it may borrow weights from.
      on_progress: called with a line of text before each step that takes time.

    Raises:
      CheckpointError: it is missing, damaged, or its architecture is not supported.
      ConfigError: the dtype is unknown, or a file of another kind is to be kept as GGUF.
      DisagreementError: the processes of a run would not load the same files.
    """
    if dtype not in LLM_DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; choose one of {', '.join(LLM_DTYPES)}.")
    progress = on_progress or (lambda line: None)
    packing = packing or Packing()
    name, path = locate(reference, progress)
    progress(f"loading {name}")
    if packing.as_stored and path.suffix != ".gguf":
        if target is None:
            raise ConfigError(
                f"quantization is 'gguf', but {name} is no .gguf file; use int8 or int4, which "
                "round its weights."
            )
        packing = dataclasses.replace(packing, quantization="none")
    read = _load_directory if path.is_dir() else _READERS[path.suffix]
    place = place or (lambda config: None)
    try:
        if distributed.process()[1] > 1:
            distributed.agree({f"the files of {name}": fingerprint(path)})
        if (path / draft_directory.MANIFEST).is_file():
            return _load_draft(name, path, dtype, packing, place, target)
        model, tokenizer, packing = read(path, dtype, packing, place)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    return Checkpoint(
        model,
        tokenizer,
        tokenizer.eos_token_ids,
        name,
        quantization=packing.quantization,
        speech=_speech(name, path, model, tokenizer),
    )


def _speech(name: str, path: Path, model: Model, tokenizer: Tokenizer) -> SpeechTokens | None:
    """The special tokens of a model of speech, and what its files say that it must not say."""
    encoder = model.config.encoder
    if encoder is None or not encoder.mel_bins:
        return None
    never: list[list[int]] = []
    for file, keys in _SUPPRESSED.items():
        said = read_json(path / file) if (path / file).is_file() else {}
        if keys[0] in said:
            never = [_token_ids(path / file, said, key, model.config.vocab_size) for key in keys]
            break
    return SpeechTokens.of(tokenizer, name, model.config.vocab_size, *(never or [[], []]))


def _token_ids(file: Path, said: dict[str, Any], key: str, vocab_size: int) -> list[int]:
    ids = said.get(key) or []
    if not isinstance(ids, list) or any(
        type(each) is not int or not 0 <= each < vocab_size for each in ids
    ):
        raise CheckpointError(
            f"{file}: {key} is {str(ids)[:100]}; it should be a list of token ids below "
            f"{vocab_size}."
        )
    return ids


_SUPPRESSED = {
    "generation_config.json": ("suppress_tokens", "begin_suppress_tokens"),
    "config.json": ("suppress_ids", "suppress_ids_begin"),
}
"""Where files say which tokens are suppressed, always and at first: transformers, CTranslate2."""


def save(checkpoint: Checkpoint, path: str | os.PathLike[str]) -> None:
    """Writes a model as a directory that `load` reads on any mesh; each process writes its part.

    All processes of a run call it; the path must be on storage that they share.

    Args:
      checkpoint: the model and its tokenizer.
      path: a directory that does not exist yet, or is empty.

    Raises:
      CheckpointError: the path exists already or cannot be written, or the model is a draft made
        for one target.
    """
    if checkpoint.outputs is not None:
        raise CheckpointError(
            f"{checkpoint.name} is a draft that proposes {len(checkpoint.outputs)} tokens of one "
            "target; it cannot be converted. Use its directory as it is, which is small."
        )
    try:
        save_directory(Path(path), checkpoint.model, checkpoint.tokenizer)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}.") from error


def _load_draft(
    name: str,
    path: Path,
    dtype: str,
    packing: Packing,
    place: _Place,
    target: Checkpoint | None,
) -> Checkpoint:
    lender = target and draft_directory.Lender(
        target.name, target.model, target.tokenizer, Packing(target.quantization).rounds
    )
    model, packing, outputs = draft_directory.load_draft(path, dtype, packing, place, lender)
    if target is not None and not (path / "tokenizer.json").is_file():
        tokenizer = target.tokenizer
    else:
        tokenizer = tokenizer_from_directory(path)
    return Checkpoint(
        model, tokenizer, tokenizer.eos_token_ids, name, outputs, packing.quantization
    )


def _load_directory(path: Path, dtype: str, packing: Packing, place: _Place) -> _Read:
    if (path / MANIFEST).is_file():
        return load_directory(path, dtype, packing, place)
    if (path / ctranslate2_directory.MODEL).is_file():
        return _load_ctranslate2(path, dtype, packing, place)
    config = read_json(path / "config.json")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise CheckpointError(
            f"{path}: the weights are quantized (quant_method {method!r}), which is not supported; "
            "use the checkpoint it was made from, or a .gguf file."
        )
    family = family_of_hf(config.get("model_type"))
    shape = family.config_from_hf(config)
    tensors = SafetensorsFiles(path)
    dtype, packing = packing.settled(dtype, tensors.stored)
    model = build_model(
        shape,
        family.hf_weights_of(shape, tensors),
        tensors,
        buffers=family.buffers,
        dtype=dtype,
        packing=packing,
        placement=place(shape),
    )
    return model, tokenizer_from_directory(path), packing


def _load_ctranslate2(path: Path, dtype: str, packing: Packing, place: _Place) -> _Read:
    tensors = Ctranslate2Directory(path)
    tokenizer = ctranslate2_directory.read_tokenizer(path)
    shape = whisper.config_from_hf(tensors.config)
    dtype, packing = packing.settled(dtype, tensors.stored)
    model = build_model(
        shape,
        whisper.FAMILY.hf_weights_of(shape, tensors),
        tensors,
        buffers=(),
        dtype=dtype,
        packing=packing,
        placement=place(shape),
    )
    return model, tokenizer, packing


def _load_gguf(path: Path, dtype: str, packing: Packing, place: _Place) -> _Read:
    file = GgufFile(path)
    family = family_of_gguf(file.metadata.get("general.architecture"))
    assert family.config_from_gguf  # it has an architecture's name
    tokenizer = tokenizer_from_gguf(file.metadata)
    shape = family.config_from_gguf(file.metadata, file)
    dtype, packing = packing.settled(dtype, file.stored)
    model = build_model(
        shape,
        family.gguf_weights_of(shape),
        file,
        buffers=family.buffers,
        dtype=dtype,
        packing=packing,
        placement=place(shape),
    )
    return model, tokenizer, packing


def _random(path: Path, dtype: str, packing: Packing, place: _Place) -> _Read:
    shape = Recipe.read(path).shape
    assert shape  # `locate` has followed every other recipe to its files
    dtype, packing = packing.settled(dtype, "float32")
    model = Model.random(shape, dtype=jnp.dtype(dtype), placement=place(shape))
    return pack_model(model, packing), byte_tokenizer(shape.vocab_size), packing


_READERS = {".gguf": _load_gguf, ".toml": _random}
