"""Typed errors. Every message names the offending value and the remedy."""

import contextlib
import difflib
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

PEER_LOST = 3
"""Exit code of a process whose peers are gone."""

_LONGEST = 2000
"""Characters of the longest message; what was given, or stood in a file, may be longer."""


class SpecJaxError(Exception):
    """Base class of every error that spec-jax raises on purpose.

    Messages are safe to print: control characters are escaped, and long ones are cut.
    """

    def __init__(self, message: str):
        super().__init__(printable(message))


def printable(text: str) -> str:
    """Text that a terminal shows as it is: no control characters but line breaks, no endless text.

    Characters that only change how others look, such as those that turn the direction of writing,
    are escaped too.
    """
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST - 200]} [...] {text[-190:]}"
    return "".join(
        each if each == "\n" or unicodedata.category(each)[0] != "C" else ascii(each)[1:-1]
        for each in text
    )


@contextlib.contextmanager
def raising_panics() -> Iterator[None]:
    """Raises a panic of the tokenizers library, which is not an `Exception`, as a ValueError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizers library fails: {error}") from error


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Raises a package that is missing in the block as an error that names the extra to install.

    Args:
      name: an extra of pyproject.toml.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "spec_jax":
            raise
        raise ConfigError(
            f"this needs the package {package!r}, which is not installed; install the extra "
            f'{name!r}: pip install "spec-jax[{name}]".'
        ) from error


class ConfigError(SpecJaxError, ValueError):
    """A configuration value is unknown, out of range, or contradicts another one."""


class RequestError(SpecJaxError, ValueError):
    """A prompt cannot be decoded as asked: empty, too long, or not text."""


class ContextLengthError(RequestError):
    """A prompt has more tokens than the context holds."""


class QueueFullError(SpecJaxError):
    """As many requests wait as may; a later try may succeed."""


class ShutdownError(SpecJaxError):
    """What decodes was shut down."""


class GenerationError(SpecJaxError):
    """`LLM.generate` failed while decoding; the original error is the `__cause__`.

    Attributes:
      outputs: by prompt, the results of the requests that had finished; None for all others.
    """

    def __init__(self, message: str, outputs: Sequence[Any]):
        super().__init__(message)
        self.outputs = list(outputs)


class CheckpointError(SpecJaxError):
    """A checkpoint is missing, damaged, of an unknown architecture, or of the wrong shape."""


class VocabularyMismatchError(ConfigError):
    """Draft and target do not share one vocabulary, so the draft's token ids mean other text."""


class DisagreementError(ConfigError):
    """Processes of one run were started differently; every one of them raises it."""


class JoinError(ConfigError):
    """Other processes of a run did not come, or not in time; another try may succeed."""


class TrainingError(SpecJaxError):
    """Training a draft cannot continue; saved files are intact."""


class BenchmarkError(SpecJaxError):
    """A benchmark cannot be run, or a file of results is damaged or of another measurement."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether JAX reports, when compiling or running, that a device's memory is too small."""
    return type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(error)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Returns `` Did you mean 'x'?`` for the closest known name, or the list of known names."""
    names = sorted(names)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(names)}."


def unknown_option(
    owner: str, name: str, options: Iterable[str], unsupported: Mapping[str, str]
) -> ConfigError:
    """The error for an option that `owner` does not have.

    Args:
      owner: the class or function that got it.
      name: the option.
      options: the options that there are.
      unsupported: for options that users of other libraries give, what to do instead.
    """
    if name in unsupported:
        return ConfigError(f"{owner} has no option {name!r}; {unsupported[name]}.")
    if close := difflib.get_close_matches(name, options, n=1, cutoff=0.7):
        return ConfigError(f"{owner} has no option {name!r}. Did you mean {close[0]!r}?")
    return ConfigError(f"{owner} has no option {name!r}; help({owner}) says what it has.")
