"""Models in object stores: `gs://` and `s3://` references.

A model's small files are copied into a folder of the cache, with a list of its weight files
(safetensors or Orbax's). Each process then reads only the byte ranges that its devices need. A
.gguf file is copied whole. obstore, over Rust's object_store, talks to the store.
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from spec_jax.checkpoints.fetch import SCRATCH, filling
from spec_jax.checkpoints.files import MODEL_FILES, read_json
from spec_jax.config import cache_directory
from spec_jax.errors import CheckpointError, extra
from spec_jax.files import replace_text

_URL = re.compile(r"(gs|s3)://([^/\s]+)/(\S+?)/?")
_LIST = "spec_jax_bucket.json"
_SAFETENSORS = "*.safetensors"
_CONVERTED = ("spec_jax.json", "tokenizer.json")
"""Small files that `spec-jax convert` writes; the first one identifies such a directory."""
DATABASE = "manifest.ocdbt"
"""The file that leads to all arrays of an Orbax checkpoint."""
_MAX_SMALL_BYTES = 64 << 20
"""Bytes of the largest file that is copied besides weights."""
AT_ONCE, BLOCK = 16, 16 << 20
"""Requests at a time, and the bytes of the largest one: at most 256 MiB are in flight."""


@dataclass(frozen=True)
class StoredFile:
    """A file of a bucket, as it was when it was listed.

    Attributes:
      url: where it is.
      size: its bytes.
      tag: the store's identifier of its contents; empty if the store gives none.
      store: obstore's object of the bucket.
    """

    url: str
    size: int
    tag: str
    store: Any = field(repr=False, compare=False)

    def read(self, start: int, stop: int) -> bytes:
        """Bytes start to stop - 1; several threads may read.

        Raises:
          CheckpointError: they cannot be read, or the file is no longer the one that was listed.
        """
        condition = {"if_match": self.tag} if self.tag else {}
        with _explaining(self.url):
            options = {"range": (start, stop), **condition}
            data = bytes(_obstore().get(self.store, _split(self.url)[1], options=options).bytes())
        if len(data) != stop - start:
            raise CheckpointError(f"{self.url} ends after {start + len(data)} of {stop} bytes.")
        return data

    def copy(self, path: Path) -> None:
        """Writes the file to a path, which then exists whole or not at all."""
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=SCRATCH) as scratch:
            new = Path(scratch) / path.name
            new.touch()

            def fetch(start: int) -> None:
                with new.open("r+b") as file:
                    file.seek(start)
                    file.write(self.read(start, min(start + BLOCK, self.size)))

            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(fetch, range(0, self.size, BLOCK)))
            new.replace(path)


def is_url(reference: str) -> bool:
    """Whether a reference names something in a bucket."""
    return reference.startswith(("gs://", "s3://"))


def fetch_from_bucket(
    url: str, progress: Callable[[str], object], *, config_only: bool = False
) -> tuple[str, Path]:
    """Copies the small files of a model in a bucket, or a .gguf file.

    Credentials come from the environment: AWS_ACCESS_KEY_ID and so on, or
    GOOGLE_APPLICATION_CREDENTIALS, or the role of the machine. AWS_ENDPOINT_URL names another
    store that speaks S3, and AWS_SKIP_SIGNATURE=true or GOOGLE_SKIP_SIGNATURE=true reads public
    buckets without credentials.

    Args:
      url: `gs://bucket/folder`, `s3://bucket/folder`, or such an address of a .gguf file.
      progress: called with a line of text before the store is asked.
      config_only: copy only the file that holds the model's shape.

    Returns:
      The model's name, and a folder of the cache for `weights_in`, or a .gguf file.

    Raises:
      CheckpointError: nothing is there, it has another format, or the store refuses.
      ConfigError: obstore is not installed.
    """
    match = _URL.fullmatch(url)
    if match is None:
        raise CheckpointError(
            f"{url} is not a model in a bucket; write gs://BUCKET/FOLDER or s3://BUCKET/FOLDER, or "
            "the address of a .gguf file."
        )
    url = match[0].rstrip("/")
    progress(f"looking into {url}")
    name = PurePosixPath(url).name
    folder = _cache() / f"{name}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"
    with filling(folder, url, progress):
        if not url.endswith(".gguf"):
            _copy_small(url, folder, config_only)
            return name, folder
        file = _list(url.rpartition("/")[0]).get(name)
        if file is None:
            raise CheckpointError(f"{url} does not exist.")
        path = folder / name
        if not _is_copied(path, _copies(folder), file):
            progress(f"copying {url}, {file.size / 1e9:.1f} GB, once")
            file.copy(path)
            _write_list(folder, url, {}, {name: file})
        return path.stem, path


def weights_in(folder: Path) -> dict[str, StoredFile] | None:
    """The weight files that stayed in the bucket, by name; None for any other folder."""
    # A list that comes with somebody's checkpoint must not make us read from other places.
    if folder.parent != _cache() or not (folder / _LIST).is_file():
        return None
    listed = read_json(folder / _LIST)
    store = _store_of(listed["url"])
    return {
        name: StoredFile(f"{listed['url']}/{name}", size, tag, store)
        for name, (size, tag) in listed["files"].items()
    }


def _cache() -> Path:
    return cache_directory() / "buckets"


def _copy_small(url: str, folder: Path, config_only: bool) -> None:
    """Makes a folder equal to the bucket's, except for the weights."""
    files = {name: file for name, file in _list(url).items() if name != _LIST}
    if "model.bin" in files:
        raise CheckpointError(
            f"{url} is a model in CTranslate2's format, which is read from a disk only; copy it to "
            "one, or put what `spec-jax convert` makes of it into the bucket."
        )
    converted = _CONVERTED[0] in files
    shape = _CONVERTED[0] if converted else "config.json"
    if shape not in files:
        raise CheckpointError(
            f"{url} has neither config.json nor {_CONVERTED[0]} among its {len(files)} files; give "
            "the folder of a Hugging Face model, one that `spec-jax convert` wrote, or the address "
            "of a .gguf file."
        )
    small = {
        name: file
        for name, file in files.items()
        if not fnmatch(name, _SAFETENSORS)
        and any(fnmatch(name, each) for each in ([shape] if config_only else MODEL_FILES))
    }
    copies = _copies(folder)
    for name, file in small.items():
        if file.size > _MAX_SMALL_BYTES:
            raise CheckpointError(
                f"{file.url} has {file.size} bytes; expected at most {_MAX_SMALL_BYTES}."
            )
        if not _is_copied(folder / name, copies, file):
            file.copy(folder / name)
    # The list stays until it is replaced: earlier processes may be about to read it.
    for old in folder.iterdir():
        if old.is_file() and old.name not in (*files, _LIST):
            old.unlink()
    if config_only:
        return
    weights = {name: file for name, file in files.items() if fnmatch(name, _SAFETENSORS)}
    if converted:
        below = _list(f"{url}/weights", below=True)
        weights = {f"weights/{name}": file for name, file in below.items()}
        missing = [name for name in _CONVERTED if name not in files]
        if not any(PurePosixPath(name).name == DATABASE for name in weights):
            missing.append(f"weights/**/{DATABASE}")
        if missing:
            raise CheckpointError(
                f"{url} lacks {missing[0]}; upload the whole directory that `spec-jax convert` "
                "wrote."
            )
    _write_list(folder, url, weights, small)


def _is_copied(path: Path, copies: dict[str, list[Any]], file: StoredFile) -> bool:
    """Whether a copy equals the file in the bucket, as it is now."""
    return path.is_file() and bool(file.tag) and copies.get(path.name) == [file.size, file.tag]


def _copies(folder: Path) -> dict[str, list[Any]]:
    """Sizes and tags of earlier copies."""
    return read_json(folder / _LIST)["copied"] if (folder / _LIST).is_file() else {}


def _write_list(
    folder: Path, url: str, weights: dict[str, StoredFile], copied: dict[str, StoredFile]
) -> None:
    files, copies = (
        {name: [file.size, file.tag] for name, file in each.items()} for each in (weights, copied)
    )
    value = {"url": url, "files": files, "copied": copies}
    replace_text(folder / _LIST, json.dumps(value))


def _list(url: str, *, below: bool = False) -> dict[str, StoredFile]:
    """The files directly in a folder, by name; with `below`, all files below it, by path."""
    store, (_, prefix) = _store_of(url), _split(url)
    depth, within = len(PurePosixPath(prefix).parts), f"{prefix}/" if prefix else None
    with _explaining(url):
        if below:
            objects = itertools.chain.from_iterable(_obstore().list(store, within))
        else:
            objects = _obstore().list_with_delimiter(store, within)["objects"]
        entries = {"/".join(each["path"].split("/")[depth:]): each for each in objects}
    return {
        name: StoredFile(f"{url}/{name}", each["size"], each["e_tag"] or "", store)
        for name, each in entries.items()
    }


def _split(url: str) -> tuple[str, str]:
    """A bucket's address, and a name in it."""
    scheme, _, path = url.partition("://")
    bucket, _, name = path.partition("/")
    return f"{scheme}://{bucket}", name


def _store_of(url: str) -> Any:
    """The bucket of an address; stores on this machine may speak plain HTTP."""
    _obstore()
    from obstore.store import from_url

    with _explaining(url):
        return from_url(_split(url)[0], client_options={"allow_http": True})


def _obstore() -> Any:
    with extra("bucket"):
        import obstore
    return obstore


@contextlib.contextmanager
def _explaining(url: str) -> Iterator[None]:
    """Raises errors of the object store as ours."""
    from obstore import exceptions

    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{url} does not exist. Check its spelling.") from None
    except exceptions.PreconditionError:
        raise CheckpointError(
            f"{url} was changed while it was read; start again when its upload has ended."
        ) from None
    except (exceptions.BaseError, ValueError) as error:
        raise unreadable(url, error) from error


def kvstore(url: str) -> dict[str, Any]:
    """TensorStore's description of a folder; in a bucket with the credentials that obstore uses."""
    if not is_url(url):
        return {"driver": "file", "path": url}
    address, path = _split(url)
    scheme, _, bucket = address.partition("://")
    if scheme == "gs":
        return {"driver": "gcs", "bucket": bucket, "path": path}
    spec: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": path}
    environment = os.environ
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    if endpoint := environment.get("AWS_ENDPOINT_URL"):
        spec["endpoint"], region = endpoint, region or "us-east-1"
    if region:
        spec["aws_region"] = region
    if environment.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true"):
        spec["aws_credentials"] = {"type": "anonymous"}
    elif "AWS_ACCESS_KEY_ID" in environment:
        spec["aws_credentials"] = {"type": "environment"}
    return spec


def unreadable(url: str, error: Exception) -> CheckpointError:
    """The error for a store that fails or refuses."""
    return CheckpointError(
        f"{url} cannot be read ({first_line(error)}). Check its spelling, the network and the "
        "credentials in the environment, see docs/pods.md."
    )


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
