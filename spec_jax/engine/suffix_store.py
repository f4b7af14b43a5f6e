"""A file of past outputs that the `suffix` method searches from one process to the next."""

import dataclasses
import hashlib
import json
import logging
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from jaxtyping import Int
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from spec_jax.engine.suffix_index import END, NAMESPACES, SuffixIndex
from spec_jax.errors import ConfigError
from spec_jax.files import new_file
from spec_jax.text.tokenizer import Tokenizer

MAX_STORED = 2**19
"""Tokens of a store, the ends of outputs included: a file of 4 MiB."""
MIN_SIZE = 2**10
"""The arrays of a store are as long as the next power of two, so that few programs are compiled."""
MAX_FILE_BYTES = 2**23
MAX_NAMESPACE = 256
"""Characters of the name of a namespace whose outputs are stored."""
MAX_WAIT = 10.0
"""Seconds that a process waits for another one that writes the same file."""
FORMAT = "spec-jax suffix store 1"

log = logging.getLogger("spec_jax")


@dataclasses.dataclass(frozen=True)
class StoredOutputs:
    """The outputs of a store, namespace after namespace.

    Attributes:
      tokens: the outputs, each followed by `END`.
      order: for each namespace, from its begin on, the suffix array of its part of the tokens.
      parts: the begin of each namespace, and how many positions its suffix array has.
    """

    tokens: Int[np.ndarray, " size"]
    order: Int[np.ndarray, " size"]
    parts: Mapping[str, tuple[int, int]]

    @property
    def num_tokens(self) -> int:
        """Tokens of all outputs."""
        return sum(count for _, count in self.parts.values())

    @classmethod
    def of(cls, index: SuffixIndex) -> "StoredOutputs":
        """The contents of an index."""
        tokens, order, parts, begin = [], [], {}, 0
        for namespace, text, positions in index.parts():
            parts[namespace] = begin, len(positions)
            tokens.append(text)
            order.append(np.pad(positions + begin, (0, len(text) - len(positions))))
            begin += len(text)
        size = max(MIN_SIZE, 1 << (begin - 1).bit_length() if begin else 0)

        def padded(arrays: list[np.ndarray], fill: int) -> np.ndarray:
            return np.concatenate([*arrays, np.full(size - begin, fill)]).astype(np.int32)

        return cls(padded(tokens, END), padded(order, 0), parts)

    def of_rows(self, namespaces: Sequence[str], batch: int) -> Int[np.ndarray, "batch 2"]:
        """The parts that the first rows of a batch may search; the others may search nothing."""
        parts = np.zeros((batch, 2), np.int32)
        for row, namespace in enumerate(namespaces):
            parts[row] = self.parts.get(namespace, (0, 0))
        return parts

    def add_to(self, index: SuffixIndex) -> None:
        """Adds all outputs to an index."""
        for namespace, (begin, count) in self.parts.items():
            text = self.tokens[begin:]
            # A suffix array leaves out the ends, and so there are as many tokens before the last.
            num_tokens = np.cumsum(text != END)
            last = int(np.searchsorted(num_tokens, count)) + 1
            index.extend(namespace, text[: last + 1])


def _new_index() -> SuffixIndex:
    return SuffixIndex(MAX_STORED, NAMESPACES, MAX_STORED)


class SuffixStore:
    """A file of past outputs, and the ones that this process adds to it.

    Several processes may read a file. New outputs are added when `write` is called and when the
    process ends, without those that are there already. The file is replaced as a whole, and where
    several processes add to it, they do so one after another.

    Args:
      path: the file; it need not exist.
      tokenizer: of the target; a store is for one vocabulary.
      vocab_size: of the target.

    Attributes:
      outputs: what the file held when it was opened.

    Raises:
      ConfigError: the file is damaged, or of another vocabulary.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer | None, vocab_size: int):
        self.path = path
        self._vocabulary = checksum(tokenizer, vocab_size), vocab_size
        self.outputs = StoredOutputs.of(_new_index())
        if path.exists():
            self.outputs = read_store(path, *self._vocabulary)
        self._added = _new_index()
        weakref.finalize(self, _write_at_end, path, self._vocabulary, self._added)

    def add(self, namespace: str, token_ids: Sequence[int]) -> None:
        """Keeps a finished output, to be written."""
        if len(namespace) <= MAX_NAMESPACE:
            self._added.add(namespace, token_ids)

    def write(self) -> None:
        """Adds the outputs to the file.

        Raises:
          ConfigError: the file was damaged meanwhile, or another process writes it for too long.
          OSError: for example, the disk is full.
        """
        _write(self.path, self._vocabulary, self._added)
        self.outputs = read_store(self.path, *self._vocabulary)


def checksum(tokenizer: Tokenizer | None, vocab_size: int) -> str:
    """Tells vocabularies apart."""
    digest = hashlib.sha256(str(vocab_size).encode())
    if tokenizer is not None:
        for token in range(tokenizer.vocab_size):
            digest.update(tokenizer.token(token).encode() + b"\0")
    return digest.hexdigest()


def read_store(path: Path, vocabulary: str, vocab_size: int) -> StoredOutputs:
    """The contents of a file.

    Raises:
      ConfigError: the file is damaged, or of another vocabulary.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError("it is not one")
            made_for, namespaces = metadata["vocabulary"], json.loads(metadata["namespaces"])
            tokens, order, parts = (file.get_tensor(name) for name in _ARRAYS)
        outputs = _checked(tokens, order, parts, namespaces, vocab_size)
    except (OSError, SafetensorError, ValueError, KeyError, RecursionError) as error:
        raise ConfigError(
            f"suffix_store is {str(path)!r}, which cannot be read as a suffix store: {error}; give "
            "another file, or delete it."
        ) from error
    if made_for != vocabulary:
        raise ConfigError(
            f"suffix_store is {str(path)!r}, which holds outputs of a model of another vocabulary; "
            "give another file."
        )
    return outputs


_ARRAYS = ("tokens", "order", "parts")


def _checked(
    tokens: np.ndarray, order: np.ndarray, parts: np.ndarray, namespaces: object, vocab_size: int
) -> StoredOutputs:
    size = len(tokens) if tokens.ndim == 1 else 0
    if any(each.dtype != np.int32 for each in (tokens, order, parts)):
        raise ValueError("its arrays are not of int32")
    if not size or order.shape != (size,) or size & (size - 1) or size < MIN_SIZE:
        raise ValueError(f"its arrays have the shapes {tokens.shape} and {order.shape}")
    if tokens.min() < END or tokens.max() >= vocab_size or order.min() < 0 or order.max() >= size:
        raise ValueError("a number is out of range")
    names = namespaces if isinstance(namespaces, list) else []
    if not all(isinstance(each, str) for each in names) or len(set(names)) != len(names):
        raise ValueError("its namespaces are not names")
    if parts.shape != (len(names), 2) or parts.min(initial=0) < 0 or len(names) > NAMESPACES:
        raise ValueError(f"it has {len(names)} namespaces, and parts of the shape {parts.shape}")
    if parts.sum(1).max(initial=0) > size:
        raise ValueError("a namespace is out of range")
    pairs = (tuple(each) for each in parts.tolist())
    return StoredOutputs(tokens, order, dict(zip(names, pairs, strict=True)))


def write_store(path: Path, vocabulary: str, outputs: StoredOutputs) -> None:
    """Writes a file that appears when it is complete.

    Raises:
      OSError: for example, the disk is full.
    """
    parts = np.array([*outputs.parts.values()], np.int32).reshape(-1, 2)
    metadata = {"format": FORMAT, "vocabulary": vocabulary}
    metadata["namespaces"] = json.dumps([*outputs.parts])
    with new_file(path) as partial:
        arrays = zip(_ARRAYS, (outputs.tokens, outputs.order, parts), strict=True)
        save_file(dict(arrays), partial, metadata)


def _write(path: Path, vocabulary: tuple[str, int], added: SuffixIndex) -> None:
    """Adds outputs to a file, to what other processes have written since."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.lock")
    try:
        with FileLock(lock, timeout=MAX_WAIT):
            index = _new_index()
            if path.exists():
                read_store(path, *vocabulary).add_to(index)
            for namespace, text, _ in added.parts():
                index.extend(namespace, text)
            write_store(path, vocabulary[0], StoredOutputs.of(index))
    except Timeout:
        message = f"another process holds {str(lock)!r} for more than {MAX_WAIT:g} s; try again."
        raise ConfigError(message) from None
    added.clear()


def _write_at_end(path: Path, vocabulary: tuple[str, int], added: SuffixIndex) -> None:
    if not added.size:
        return
    try:
        _write(path, vocabulary, added)
    except (OSError, ConfigError) as error:
        log.warning("the outputs of this process were not added to %s: %s", path, error)
