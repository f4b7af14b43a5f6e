"""Writes a model in another format while reading it."""

import os
from collections.abc import Callable
from pathlib import Path

from spec_jax import distributed
from spec_jax.checkpoints import draft_directory, orbax_directory
from spec_jax.checkpoints.checksums import write_checksums
from spec_jax.checkpoints.files import reading
from spec_jax.checkpoints.generation_config import sampling_settings
from spec_jax.checkpoints.hf_writer import (
    GENERATION,
    write_generation,
    write_tokenizer,
    write_weights,
)
from spec_jax.checkpoints.new_directory import new_directory, refuse_existing
from spec_jax.checkpoints.opening import (
    SUPPRESSED,
    Place,
    find,
    on_single_device,
    open_model,
    speech_tokens,
)
from spec_jax.checkpoints.packing import STORED, Packing
from spec_jax.config import AUTO, CHECKPOINT_FORMATS, LLM_DTYPES, QUANTIZATIONS
from spec_jax.errors import CheckpointError, ConfigError
from spec_jax.models.registry import family_of_shape


def convert(
    reference: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    format: str = "orbax",
    dtype: str = AUTO,
    quantization: str = AUTO,
    place: Place = on_single_device,
    on_progress: Callable[[str], object] | None = None,
) -> None:
    """Writes a model as a directory of another format.

    It is read and written one or two GiB at a time, so that it need not fit into memory. The
    directory appears when it is complete, with a list of checksums that `load` compares.
    All processes of a run call it, and the path must be on storage that they share.

    Args:
      reference: the model; see `load`.
      path: a directory that does not exist yet, or is empty.
      format: `orbax`, of which the processes of a run write and read their own parts, on any mesh;
        or `safetensors`, the layout of Hugging Face directories.
      dtype: the dtype of the written weights; `auto` keeps every number: bfloat16 where bfloat16
        is stored, else float32.
      quantization: for Orbax, the format of the written matrices: `none`, `int8`, `int4` or `gguf`
        (unchanged from a .gguf file). `auto` keeps the format of an Orbax directory; it is `none`
        for other models.
      place: see `load`.
      on_progress: see `load`.

    Raises:
      CheckpointError: the model cannot be read, or is a draft that borrows from its target; the
        path exists already or cannot be written.
      ConfigError: a choice is unknown, or contradicts another.
      DisagreementError: the processes of a run would not load the same files.
    """
    for name, choice, choices in (
        ("format", format, CHECKPOINT_FORMATS),
        ("dtype", dtype, LLM_DTYPES),
        ("quantization", quantization, QUANTIZATIONS),
    ):
        if choice not in choices:
            raise ConfigError(f"{name} is {choice!r}; choose one of {', '.join(choices)}.")
    if format == "safetensors" and quantization not in (AUTO, "none"):
        raise ConfigError(
            f"quantization is {quantization!r}, but safetensors directories hold plain numbers; "
            "use format orbax, or quantization none."
        )
    path = Path(path)
    distributed.agree({"output": str(path), "format": format})
    if format == "orbax":
        orbax_directory.check_path(path)
    distributed.from_first(lambda: refuse_existing(path))  # before anything is fetched or read
    packing = Packing("none" if format == "safetensors" else quantization)
    name, source, packing = find(reference, dtype, packing, by_itself=True, on_progress=on_progress)
    if (source / draft_directory.MANIFEST).is_file():
        raise CheckpointError(
            f"{name} is a draft made for one target; it cannot be converted. Use its directory as "
            "it is, which is small."
        )
    with reading(source):
        stored = open_model(source, STORED if dtype == AUTO else dtype, packing, place)
        speech = speech_tokens(name, source, stored)
    if format == "safetensors":
        family_of_shape(stored.config)  # it can be written
    with new_directory(path) as partial:
        if on_progress:
            on_progress(f"writing {path}")
        if format == "orbax":
            orbax_directory.write_directory(partial, stored)
        else:
            shapes = {name: leaf.shape for name, leaf in stored.weights.leaves.items()}
            write_weights(partial, stored.config, shapes, stored.weights.read, stored.dtype)
            write_tokenizer(partial, stored.tokenizer)
        settings = sampling_settings(source)
        if speech is not None:
            suppressed = (list(speech.suppressed), list(speech.suppressed_first))
            settings |= dict(zip(SUPPRESSED[GENERATION], suppressed, strict=True))
        if settings:
            write_generation(partial, stored.tokenizer, **settings)
        write_checksums(partial)
