"""A file of results that a killed job continues. Imports no JAX."""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from spec_jax.errors import ConfigError
from spec_jax.text.json_lines import append_line, drop_unfinished_line

if TYPE_CHECKING:
    from spec_jax.cli.decoding_options import GenerateOptions

_OF_THE_TEXT = ("dtype", "quantization", "activations", "kv_cache_dtype", "max_model_len")
"""Arguments of `LLM` that change what is said; how it is drafted and sharded may be changed."""


def refuse_existing(path: Path, resume: bool | None = None) -> None:
    """Refuses to write where something is, unless the job continues it (`resume`).

    Raises:
      ConfigError: there is a file and `resume` is not set, or there can be none.
    """
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"out is {str(path)!r}; give a file in a directory that exists.")
    if path.exists() and not resume:
        remedy = "" if resume is None else "--resume to continue it, or "
        raise ConfigError(f"{path} exists, and nothing is overwritten; give {remedy}another --out.")


class ResultsFile:
    """One JSON object a line, each whole on the disk once its prompt is done, in any order.

    Args:
      options: of the job.
      prompts: the keys that say what each prompt is.
      stack: until it is closed, other processes are kept from writing the file.

    Attributes:
      done: the numbers of the prompts whose results the file holds.

    Raises:
      ConfigError: the file is there and was not to be resumed, another process writes it, or it
        holds results of another job.
      OSError: it cannot be read or written.
    """

    def __init__(
        self,
        options: "GenerateOptions",
        prompts: Sequence[dict[str, Any]],
        stack: contextlib.ExitStack,
    ):
        assert options.output is not None
        self._path, self._prompts, self._settings = options.output, prompts, _digest(options)
        refuse_existing(self._path, options.resume)
        self.done: set[int] = set()
        self._claim(stack.enter_context(self._path.open("ab")))
        drop_unfinished_line(self._path, b'{"index": ')
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                self.done.add(self._index(line, f"{self._path}, line {number}"))

    def add(self, index: int, result: dict[str, Any]) -> None:
        """Writes the result of a prompt."""
        header = {"index": index} | self._prompts[index]
        append_line(self._path, {**header, **result, "settings": self._settings})
        self.done.add(index)

    def _claim(self, file: IO[bytes]) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{self._path} is being written by another process; wait for it, or choose another."
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise  # some shared storage knows no locks

    def _index(self, line: bytes, where: str) -> int:
        other = f"{where} is not a result of this job; give another --out"
        try:
            record = json.loads(line)
            index, settings = record["index"], record["settings"]
            prompt = self._prompts[index]
            same = index >= 0 and all(record[key] == prompt[key] for key in prompt)
        except (ValueError, RecursionError, LookupError, TypeError) as error:
            raise ConfigError(f"{other}.") from error
        if not same:
            raise ConfigError(f"{other}, or the prompts that it began with.")
        if settings != self._settings:
            raise ConfigError(
                f"{where} was made with another model, other sampling or another precision; give "
                "the same options, or another --out."
            )
        return index


def _digest(options: "GenerateOptions") -> str:
    """What a text depends on, besides its prompt."""
    sampling = sorted(dataclasses.asdict(options.sampling).items())
    loading = [options.llm.get(name) for name in _OF_THE_TEXT]
    template = (options.chat, options.tools, options.chat_template_kwargs)
    settings = (options.target, template, sampling, loading)
    return hashlib.sha256(repr(settings).encode()).hexdigest()[:16]
