"""Typed errors. Every message names the offending value and says what to do about it."""

import difflib
from collections.abc import Iterable


class SpecJaxError(Exception):
    """Base class of every error that spec-jax raises on purpose."""


class ConfigError(SpecJaxError, ValueError):
    """A configuration value is unknown, out of range, or contradicts another one."""


class RequestError(SpecJaxError, ValueError):
    """A prompt cannot be decoded as asked: empty, too long, or not text."""


class CheckpointError(SpecJaxError):
    """A checkpoint is missing, damaged, of an unknown architecture, or of the wrong shape."""


class VocabularyMismatchError(ConfigError):
    """Draft and target do not share one vocabulary, so the draft's token ids mean other text."""


class DisagreementError(ConfigError):
    """Processes of one run were started differently; every one of them raises it."""


class TrainingError(SpecJaxError):
    """Training a draft cannot go on; what was saved is intact."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether JAX says, when it compiles or when it runs, that a device's memory is too small."""
    return type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(error)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns `` Did you mean 'x'?`` for the closest known name, or the list of known names."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(known)}."
