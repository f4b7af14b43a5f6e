"""Directories of drafts that were trained for one target, and may borrow weights from it.

Besides a Hugging Face config.json and model.safetensors, `spec_jax_draft.json` names the borrowed
weights, and the target's tokens that the draft can propose.
"""

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pydantic

from spec_jax import distributed
from spec_jax.checkpoints.checkpoint import Checkpoint
from spec_jax.checkpoints.files import damaged, read_json
from spec_jax.checkpoints.hf_writer import write_json, write_model, write_tokenizer
from spec_jax.checkpoints.packing import Packing
from spec_jax.checkpoints.safetensors_files import SafetensorsFiles
from spec_jax.checkpoints.shape import hf_shape
from spec_jax.checkpoints.weights import TensorWeights
from spec_jax.config.explain import explain
from spec_jax.errors import CheckpointError
from spec_jax.kernels import Weight, columns
from spec_jax.models.config import TransformerConfig
from spec_jax.models.model import Model
from spec_jax.sharding import Placement

MANIFEST = "spec_jax_draft.json"
_VERSION = 1
_COMPARED = 64


class _Manifest(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)

    version: int
    target: str
    embedding: str
    borrowed: list[str]
    outputs: list[int] | None


def write_draft(
    path: Path,
    draft: Model,
    target: Checkpoint,
    dtype: str,
    *,
    outputs: np.ndarray | None,
    borrowed: tuple[str, ...],
) -> None:
    """Writes a draft.

    Args:
      path: a directory, which is created.
      draft: the draft, with all its weights.
      target: the target that it was trained for.
      dtype: the dtype of the written weights.
      outputs: the target token ids that it can propose; None for all.
      borrowed: names of the target's weights, which are not written.

    Raises:
      CheckpointError: spec-jax cannot write models of its family.
    """
    # The draft's head has only its outputs, or is missing: config.json describes the target's head.
    tied = dataclasses.replace(draft.config, tied_head=target.model.config.tied_head)
    shape = dataclasses.replace(draft, config=tied)
    write_model(path, shape, dtype, leave_out=borrowed)
    if not borrowed:
        write_tokenizer(path, target.tokenizer)
    manifest = _Manifest(
        version=_VERSION,
        target=target.name,
        embedding=_fingerprint(target.model),
        borrowed=list(borrowed),
        outputs=None if outputs is None else outputs.tolist(),
    )
    write_json(path / MANIFEST, manifest.model_dump())


def load_draft(
    path: Path,
    dtype: str,
    packing: Packing,
    place: Callable[[TransformerConfig], Placement],
    target: Checkpoint | None,
) -> tuple[Model, Packing, np.ndarray | None]:
    """Reads a draft that `write_draft` wrote.

    Also returns the form of its matrices and the ids that it can propose.

    Raises:
      CheckpointError: it is damaged, or was trained for another target.
    """
    manifest = read_json(path / MANIFEST)
    if manifest.get("version") != _VERSION:
        raise CheckpointError(
            f"{path / MANIFEST} is of version {manifest.get('version')!r}; this spec-jax reads "
            f"{_VERSION}. Update spec-jax, or train the draft again."
        )
    try:
        manifest = _Manifest(**manifest)
    except pydantic.ValidationError as error:
        raise damaged(path / MANIFEST, explain(error)) from None
    family, shape = hf_shape(path)
    ids = None if manifest.outputs is None else np.asarray(manifest.outputs, np.int32)
    if ids is not None:
        shape = dataclasses.replace(shape, tied_head=False)
    placement = place(shape)
    tensors = SafetensorsFiles(path)
    dtype, packing = packing.settled(dtype, tensors.stored)
    weights = {}
    if manifest.borrowed:
        weights = _borrow(path, manifest, target, dtype, placement)
    stored = TensorWeights(
        shape,
        family.hf_weights_of(shape),
        tensors,
        buffers=family.buffers,
        dtype=dtype,
        placement=placement,
        borrowed=weights,
        packing=packing,
        outputs=None if ids is None else len(ids),
    )
    model = Model.abstract(shape, dtype=dtype, placement=placement)
    return model.with_weights({**stored.read(stored.leaves), **weights}), packing, ids


def _borrow(
    path: Path,
    manifest: _Manifest,
    target: Checkpoint | None,
    dtype: str,
    placement: Placement,
) -> dict[str, Weight]:
    """The target's weights that the draft uses."""
    made_for = manifest.target
    if target is None:
        raise CheckpointError(
            f"{path} is a draft that borrows its embedding from {made_for}, the target it was "
            "trained for; use it as the draft of that target, not by itself."
        )
    # A quantized embedding cannot be compared; then the name has to be the same.
    if Packing(target.quantization).rounds:
        matches = target.name == made_for
    else:
        matches = _fingerprint(target.model) == manifest.embedding
    if not matches:
        raise CheckpointError(
            f"{path} is a draft that borrows its embedding from {made_for}, and {target.name} has "
            "another; use it with the target it was trained for, or train one for this target."
        )
    outputs = manifest.outputs
    source = target.model if outputs is None else target.model.with_outputs(outputs)
    axes = ("embed", "vocab")
    weights = {}
    for name in manifest.borrowed:
        weight = source.weights[name]
        if isinstance(weight, jax.Array):
            weight = jax.device_put(weight.astype(dtype), placement.sharding(*axes))
        weights[name] = weight
    return weights


def _fingerprint(model: Model) -> str:
    """Identifies an embedding, independently of its dtype and sharding."""
    first = columns(model.weights["embed.weight"], jnp.arange(_COMPARED)).T.astype(jnp.bfloat16)
    return hashlib.sha256(np.asarray(distributed.to_host(first)).tobytes()).hexdigest()[:16]
