"""Finds a model's files and opens them, in any format."""

import dataclasses
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from spec_jax import distributed
from spec_jax.checkpoints import ctranslate2_directory, orbax_directory
from spec_jax.checkpoints.byte_tokenizer import byte_tokenizer
from spec_jax.checkpoints.checksums import verify_checksums
from spec_jax.checkpoints.ctranslate2_directory import Ctranslate2Directory
from spec_jax.checkpoints.files import fingerprint, making_sense, read_json, reading, refuse_devices
from spec_jax.checkpoints.gguf_file import GgufFile
from spec_jax.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from spec_jax.checkpoints.hf_tokenizer import tokenizer_from_directory
from spec_jax.checkpoints.hf_writer import GENERATION
from spec_jax.checkpoints.memory import check_weights_fit
from spec_jax.checkpoints.packed_copy import PackedCopy
from spec_jax.checkpoints.packing import Packing
from spec_jax.checkpoints.recipe import Recipe
from spec_jax.checkpoints.reference import locate
from spec_jax.checkpoints.safetensors_files import SafetensorsFiles
from spec_jax.checkpoints.shape import gguf_shape, hf_shape
from spec_jax.checkpoints.weights import ArrayWeights, StoredModel, TensorWeights
from spec_jax.config import LLM_DTYPES
from spec_jax.errors import CheckpointError, ConfigError, raising_panics
from spec_jax.models import whisper
from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import TensorStore, WeightTable
from spec_jax.models.model import Model
from spec_jax.sharding import Placement
from spec_jax.text.speech import SpeechTokens
from spec_jax.text.tokenizer import Tokenizer

Place = Callable[[TransformerConfig], Placement]
"""Returns the placement of a model of this shape."""


def on_single_device(config: TransformerConfig) -> Placement:
    """The default `Place`."""
    return Placement.single_device()


SUPPRESSED = {
    GENERATION: ("suppress_tokens", "begin_suppress_tokens"),
    "config.json": ("suppress_ids", "suppress_ids_begin"),
}
"""The files and keys of suppressed tokens, always and at first: transformers, CTranslate2."""


def find(
    reference: str | os.PathLike[str],
    dtype: str,
    packing: Packing | None,
    *,
    by_itself: bool,
    on_progress: Callable[[str], object] | None,
) -> tuple[str, Path, Packing]:
    """A model's name and files, compared with their checksums, and its packing.

    Args:
      reference: see `checkpoints.load`.
      dtype: see `checkpoints.load`.
      packing: see `checkpoints.load`.
      by_itself: it is not a draft, which cannot always be packed like its target.
      on_progress: see `checkpoints.load`.
    """
    if dtype not in LLM_DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; choose one of {', '.join(LLM_DTYPES)}.")
    progress = on_progress or (lambda line: None)
    packing = packing or Packing()
    name, path = locate(reference, progress)
    if (
        packing.as_stored
        and path.suffix != ".gguf"
        and not (path / orbax_directory.MANIFEST).is_file()
    ):
        if by_itself:
            raise ConfigError(
                f"quantization is 'gguf', but {name} is not a .gguf file; use int8 or int4, "
                "which round its weights."
            )
        packing = dataclasses.replace(packing, quantization="none")
    with reading(path):
        refuse_devices(path)
        if distributed.process()[1] > 1:
            distributed.agree({f"the files of {name}": fingerprint(path)})
        if path.is_dir():
            verify_checksums(path)
    return name, path, packing


def open_model(path: Path, dtype: str, packing: Packing, place: Place) -> StoredModel:
    """A model whose files are there; its weights are not yet read.

    Raises:
      CheckpointError: it is damaged, or its architecture is not supported.
    """
    if path.suffix == ".toml":
        return _random(path, dtype, packing, place)
    if (path / orbax_directory.MANIFEST).is_file():
        return orbax_directory.open_directory(path, dtype, packing, place)
    if not path.is_dir():
        opened = _gguf(path)
    elif (path / ctranslate2_directory.MODEL).is_file():
        opened = _ctranslate2(path)
    else:
        opened = _hugging_face(path)
    _check(path, opened)
    dtype, packing = packing.settled(dtype, opened.tensors.stored)
    placement = place(opened.config)
    weights = TensorWeights(
        opened.config,
        opened.table,
        opened.tensors,
        buffers=opened.buffers,
        dtype=dtype,
        packing=packing,
        placement=placement,
    )
    copy = PackedCopy.of(path, dtype, packing, placement)
    return StoredModel(opened.config, opened.tokenizer, dtype, packing, weights, placement, copy)


class _Opened(NamedTuple):
    config: TransformerConfig
    tokenizer: Tokenizer
    table: WeightTable
    tensors: TensorStore
    buffers: tuple[str, ...]


def _check(path: Path, opened: _Opened) -> None:
    """Compares the declared shape with the tensors and the tokenizer, before anything is built."""
    config, tensors = opened.config, len(opened.tensors.shapes)
    if config.num_layers > tensors:
        raise CheckpointError(
            f"{path} declares {config.num_layers} layers, but holds only {tensors} tensors. "
            "Download it again."
        )
    tokenizer = opened.tokenizer
    for each in (*tokenizer.eos_token_ids, *(tokenizer.bos_token_id,)):
        if each is not None and not (type(each) is int and 0 <= each < config.vocab_size):
            raise CheckpointError(
                f"{path}: the token that begins or ends texts is {each!r}; expected an id below "
                f"{config.vocab_size}. Correct eos_token_id and bos_token_id, or download it again."
            )


def _hugging_face(path: Path) -> _Opened:
    family, shape = hf_shape(path)
    if quantization := read_json(path / "config.json").get("quantization_config"):
        method = (
            quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        )
        raise CheckpointError(
            f"{path}: the weights are quantized (quant_method {method!r}), which is not supported; "
            "use the checkpoint it was made from, or a .gguf file."
        )
    tensors = SafetensorsFiles(path)
    table = family.hf_weights_of(shape, tensors)
    with making_sense(path), raising_panics():
        tokenizer = tokenizer_from_directory(path)
    return _Opened(shape, tokenizer, table, tensors, family.buffers)


def _ctranslate2(path: Path) -> _Opened:
    tensors = Ctranslate2Directory(path)
    with making_sense(path), raising_panics():
        tokenizer = ctranslate2_directory.read_tokenizer(path)
    with making_sense(path / ctranslate2_directory.MODEL):
        shape = whisper.config_from_hf(tensors.config)
    return _Opened(shape, tokenizer, whisper.FAMILY.hf_weights_of(shape, tensors), tensors, ())


def _gguf(path: Path) -> _Opened:
    file = GgufFile(path)
    family, shape = gguf_shape(file)
    with making_sense(path), raising_panics():
        tokenizer = tokenizer_from_gguf(file.metadata)
    return _Opened(shape, tokenizer, family.gguf_weights_of(shape), file, family.buffers)


def _random(path: Path, dtype: str, packing: Packing, place: Place) -> StoredModel:
    recipe = Recipe.read(path)
    shape = recipe.shape
    assert shape  # `locate` has followed every other recipe to its files
    warnings.warn(
        f"{recipe.name} is a shape with random weights, for plans and timing; its texts mean "
        "nothing",
        stacklevel=2,
    )
    dtype, packing = packing.settled(dtype, "float32")
    placement = place(shape)
    leaves = Model.abstract(shape, dtype=dtype, placement=placement).weights
    check_weights_fit(recipe.name, leaves, Packing())  # they are made in full, then packed
    model = Model.random(shape, dtype=jnp.dtype(dtype), placement=placement)
    tokenizer = byte_tokenizer(shape.vocab_size)
    return StoredModel(shape, tokenizer, dtype, packing, ArrayWeights(model, packing), placement)


def speech_tokens(name: str, path: Path, model: StoredModel) -> SpeechTokens | None:
    """The special tokens of a speech model, and the tokens that its files suppress."""
    encoder, vocab_size = model.config.encoder, model.config.vocab_size
    if encoder is None or not encoder.mel_bins:
        return None
    suppressed: list[list[int]] = [[], []]
    for file, keys in SUPPRESSED.items():
        config = read_json(path / file) if (path / file).is_file() else {}
        if keys[0] in config:
            suppressed = [_token_ids(path / file, config, key, vocab_size) for key in keys]
            break
    return SpeechTokens.of(model.tokenizer, name, vocab_size, *suppressed)


def _token_ids(file: Path, config: dict[str, Any], key: str, vocab_size: int) -> list[int]:
    ids = config.get(key) or []
    if not isinstance(ids, list) or any(
        type(each) is not int or not 0 <= each < vocab_size for each in ids
    ):
        raise CheckpointError(
            f"{file}: {key} is {str(ids)[:100]}; it should be a list of token ids below "
            f"{vocab_size}."
        )
    return ids
