"""Writes Hugging Face directories, whole models and drafts that borrow from their target."""

import json
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from spec_jax import distributed
from spec_jax.kernels import Weight
from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import WeightTable, stored_as
from spec_jax.models.model import Model
from spec_jax.models.registry import family_of_shape
from spec_jax.text.tokenizer import Tokenizer

GENERATION = "generation_config.json"
SHARD_BYTES = 2 << 30
"""Bytes of weights in one safetensors file, all of which are in memory while it is written."""


def write_model(path: Path, model: Model, dtype: str, *, leave_out: Collection[str] = ()) -> None:
    """Writes config.json and safetensors files; all processes call it, and the first writes.

    Args:
      path: a directory, which is created.
      model: the model.
      dtype: the dtype of the written weights.
      leave_out: names of weights that are not written.

    Raises:
      CheckpointError: spec-jax cannot write models of its family.
    """
    weights = {name: leaf for name, leaf in model.weights.items() if name not in leave_out}
    shapes = {name: leaf.shape for name, leaf in weights.items()}
    write_weights(
        path, model.config, shapes, lambda names: {name: weights[name] for name in names}, dtype
    )


def write_weights(
    path: Path,
    config: TransformerConfig,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[Collection[str]], Mapping[str, Weight]],
    dtype: str,
) -> None:
    """Writes config.json and safetensors files; all processes call it, and the first writes.

    One file is in memory at a time.

    Args:
      path: a directory, which is created.
      config: the model's shape.
      shapes: the shapes [in, out] of the weights that are written, by our names.
      read: returns weights as plain arrays [in, out], by our names.
      dtype: the dtype of the written weights.

    Raises:
      CheckpointError: spec-jax cannot write models of its family.
    """
    from huggingface_hub import split_state_dict_into_shards_factory  # slow to import

    family = family_of_shape(config)
    table, kind = family.hf_weights_of(config), jnp.dtype(dtype)
    together: dict[str, list[str]] = {}  # weights that share a tensor share a file
    for name in shapes:
        together.setdefault(stored_as(table, name)[1], []).append(name)
    files = split_state_dict_into_shards_factory(
        together,
        get_storage_size=lambda names: (
            sum(math.prod(shapes[each]) for each in names) * kind.itemsize
        ),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=SHARD_BYTES,
    )
    first = jax.process_index() == 0
    if first:
        path.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    for file, stored_names in files.filename_to_tensors.items():
        names = [name for each in stored_names for name in together[each]]
        tensors = _tensors(table, config, read(names), kind, keep=first)
        places |= dict.fromkeys(tensors, file)
        if first:
            save_file(tensors, path / file, metadata={"format": "pt"})
    if files.is_sharded:
        index = {"metadata": files.metadata, "weight_map": places}
        write_json(path / "model.safetensors.index.json", index)
    written = {**family.config_to_hf(config), "dtype": dtype, "torch_dtype": dtype}
    write_json(path / "config.json", written)


def _tensors(
    table: WeightTable,
    config: TransformerConfig,
    weights: Mapping[str, Weight],
    dtype: np.dtype,
    *,
    keep: bool,
) -> dict[str, np.ndarray]:
    """Weights as a checkpoint stores them; only their exchange if they are not kept."""
    tensors: dict[str, np.ndarray] = {}
    for name, weight in weights.items():
        ours = np.asarray(distributed.to_host(weight))
        if not keep:
            continue
        part, tensor = stored_as(table, name)
        matrices = [each.T for each in ours] if part.each else [ours.T]
        for number, each in enumerate(matrices):
            stored_name = tensor.format(number)
            tensors[stored_name] = part.give(each, config, tensors.get(stored_name))
    return {
        name: np.ascontiguousarray(tensor.astype(dtype, copy=False))
        for name, tensor in tensors.items()
    }


def write_tokenizer(path: Path, tokenizer: Tokenizer) -> None:
    """Writes the tokenizer files that transformers reads; only the first process writes."""
    if jax.process_index() > 0:
        return
    tokenizer.save(path / "tokenizer.json")
    eos = list(tokenizer.eos_token_ids)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if eos:
        config["eos_token"] = tokenizer.token(eos[0])
        write_generation(path, tokenizer)
    if tokenizer.bos_token_id is not None:
        config["bos_token"] = tokenizer.token(tokenizer.bos_token_id)
    if tokenizer.chat_template is not None:
        config["chat_template"] = tokenizer.chat_template.source
    write_json(path / "tokenizer_config.json", config)


def write_generation(path: Path, tokenizer: Tokenizer, **more: Any) -> None:
    """Writes generation_config.json; only the first process writes.

    Args:
      path: the directory.
      tokenizer: has the end-of-text tokens.
      more: further settings.
    """
    write_json(path / GENERATION, {"eos_token_id": list(tokenizer.eos_token_ids), **more})


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON file; only the first process writes."""
    if jax.process_index() > 0:
        return
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
