"""Directories of drafts that were trained for one target, and may borrow weights from it.

Besides a Hugging Face config.json and model.safetensors, `spec_jax_draft.json` names the weights
that are the target's own, and the target's tokens that the draft can propose.
"""

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import distributed
from spec_jax.checkpoints.files import damaged, read_json
from spec_jax.checkpoints.hf_writer import write_json, write_model, write_tokenizer
from spec_jax.checkpoints.packing import Packing
from spec_jax.checkpoints.safetensors_files import SafetensorsFiles
from spec_jax.checkpoints.shape import hf_shape
from spec_jax.checkpoints.weights import TensorWeights
from spec_jax.errors import CheckpointError
from spec_jax.kernels import Weight, columns
from spec_jax.models.config import TransformerConfig
from spec_jax.models.model import Model
from spec_jax.sharding import Placement
from spec_jax.text.tokenizer import Tokenizer

MANIFEST = "spec_jax_draft.json"
_VERSION = 1
_COMPARED = 64


@dataclasses.dataclass(frozen=True)
class Lender:
    """The target that a draft borrows from.

    Attributes:
      name: its name in messages.
      model: its weights.
      tokenizer: its tokenizer.
      rounded: whether its weights were quantized when they were loaded.
    """

    name: str
    model: Model
    tokenizer: Tokenizer
    rounded: bool = False


def write_draft(
    path: Path,
    draft: Model,
    target: Lender,
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
      outputs: the target's ids that it can propose; None for all.
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
    manifest = {
        "version": _VERSION,
        "target": target.name,
        "embedding": _fingerprint(target.model),
        "borrowed": list(borrowed),
        "outputs": None if outputs is None else outputs.tolist(),
    }
    write_json(path / MANIFEST, manifest)


def load_draft(
    path: Path,
    dtype: str,
    packing: Packing,
    place: Callable[[TransformerConfig], Placement],
    lender: Lender | None,
) -> tuple[Model, Packing, np.ndarray | None]:
    """Reads a draft that `write_draft` wrote.

    Also returns how it is kept and the ids that it can propose.

    Raises:
      CheckpointError: it is damaged, or was trained for a target other than the lender.
    """
    manifest = _manifest(path)
    borrowed, outputs = manifest["borrowed"], manifest["outputs"]
    family, shape = hf_shape(path)
    ids = None if outputs is None else np.asarray(outputs, np.int32)
    if ids is not None:
        shape = dataclasses.replace(shape, tied_head=False)
    placement = place(shape)
    tensors = SafetensorsFiles(path)
    dtype, packing = packing.settled(dtype, tensors.stored)
    weights = {}
    if borrowed:
        weights = _borrow(path, manifest, lender, dtype, placement)
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
    return model.with_weights({**stored.read(stored.wanted), **weights}), packing, ids


def _borrow(
    path: Path,
    manifest: dict[str, Any],
    lender: Lender | None,
    dtype: str,
    placement: Placement,
) -> dict[str, Weight]:
    """The target's weights that the draft uses as its own."""
    made_for = manifest["target"]
    if lender is None:
        raise CheckpointError(
            f"{path} is a draft that borrows its embedding from {made_for}, the target it was "
            "trained for; use it as the draft of that target, not by itself."
        )
    # A rounded embedding cannot be compared; its name has to do.
    same = (
        lender.name == made_for
        if lender.rounded
        else (_fingerprint(lender.model) == manifest["embedding"])
    )
    if not same:
        raise CheckpointError(
            f"{path} is a draft that borrows its embedding from {made_for}, and {lender.name} has "
            "another; use it with the target it was trained for, or train one for this target."
        )
    outputs = manifest["outputs"]
    source = lender.model if outputs is None else lender.model.with_outputs(outputs)
    axes = ("embed", "vocab")
    found = {}
    for name in manifest["borrowed"]:
        weight = source.weights[name]
        if isinstance(weight, jax.Array):
            weight = jax.device_put(weight.astype(dtype), placement.sharding(*axes))
        found[name] = weight
    return found


def _fingerprint(model: Model) -> str:
    """Identifies an embedding, independently of the dtype it was loaded as and its sharding."""
    first = columns(model.weights["embed.weight"], jnp.arange(_COMPARED)).T.astype(jnp.bfloat16)
    return hashlib.sha256(np.asarray(distributed.to_host(first)).tobytes()).hexdigest()[:16]


def _manifest(path: Path) -> dict[str, Any]:
    manifest = read_json(path / MANIFEST)
    if manifest.get("version") != _VERSION:
        raise CheckpointError(
            f"{path / MANIFEST} is of version {manifest.get('version')!r}; this spec-jax reads "
            f"{_VERSION}. Update spec-jax, or train the draft again."
        )
    for name, kind in (("target", str), ("embedding", str), ("borrowed", list)):
        if not isinstance(manifest.get(name), kind):
            raise damaged(path / MANIFEST, f"its {name!r} is {manifest.get(name)!r}")
    return manifest
