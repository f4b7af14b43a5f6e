"""Writes Hugging Face directories, whole models and drafts that borrow from their target."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from spec_jax import distributed
from spec_jax.models.family import stored_as
from spec_jax.models.model import Model
from spec_jax.models.registry import family_of_shape
from spec_jax.text.tokenizer import Tokenizer


def write_model(path: Path, model: Model, dtype: str, *, leave_out: Collection[str] = ()) -> None:
    """Writes config.json and model.safetensors; all processes call it, and the first writes.

    Args:
      path: a directory, which is created.
      model: the model.
      dtype: the dtype of the written weights.
      leave_out: names of weights that are not written.

    Raises:
      CheckpointError: spec-jax cannot write models of its family.
    """
    family = family_of_shape(model.config)
    assert family.config_to_hf is not None
    table = family.hf_weights_of(model.config)
    arrays = {name: leaf for name, leaf in model.weights.items() if name not in leave_out}
    tensors: dict[str, np.ndarray] = {}
    for name, value in distributed.to_host(arrays).items():
        part, tensor = stored_as(table, name)
        ours = np.asarray(value)
        matrices = [each.T for each in ours] if part.each else [ours.T]
        for number, each in enumerate(matrices):
            own = tensor.format(number)
            tensors[own] = part.give(each, model.config, tensors.get(own))
    if jax.process_index() > 0:
        return
    tensors = {
        name: np.ascontiguousarray(tensor.astype(jnp.dtype(dtype)))
        for name, tensor in tensors.items()
    }
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = {**family.config_to_hf(model.config), "dtype": dtype, "torch_dtype": dtype}
    write_json(path / "config.json", config)


def write_tokenizer(path: Path, tokenizer: Tokenizer) -> None:
    """Writes the tokenizer files that transformers reads; only the first process writes."""
    if jax.process_index() > 0:
        return
    tokenizer.save(path / "tokenizer.json")
    eos = list(tokenizer.eos_token_ids)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if eos:
        config["eos_token"] = tokenizer.token(eos[0])
        write_json(path / "generation_config.json", {"eos_token_id": eos})
    if tokenizer.bos_token_id is not None:
        config["bos_token"] = tokenizer.token(tokenizer.bos_token_id)
    if tokenizer.chat_template is not None:
        config["chat_template"] = tokenizer.chat_template.source
    write_json(path / "tokenizer_config.json", config)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON file; only the first process writes."""
    if jax.process_index() > 0:
        return
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
