"""Files of prompts and of training data: text of bounded size, and lines of JSON one by one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from spec_jax.errors import RequestError

MAX_BYTES = 128 << 20
"""Of a file of prompts; a device such as /dev/zero has no end."""


def read_text(
    source: BinaryIO | Path, name: str, *, kind: str = "prompt file", max_bytes: int = MAX_BYTES
) -> str:
    """The text of a file or stream.

    Args:
      source: the file or stream.
      name: its name in messages.
      kind: its kind in messages.
      max_bytes: the bytes of the largest file that is read; -1 for any number.

    Raises:
      RequestError: it cannot be read, is larger than `max_bytes`, or is not UTF-8.
    """
    size = max_bytes + (max_bytes >= 0)
    try:
        if isinstance(source, Path):
            with source.open("rb") as file:
                raw = file.read(size)
        else:
            raw = source.read(size)
    except OSError as error:
        raise RequestError(f"cannot read {kind} {name!r}: {error.strerror}.") from error
    if 0 <= max_bytes < len(raw):
        raise RequestError(f"{name} holds more than {max_bytes >> 20} MiB; split it.")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{name} is not UTF-8 text (byte {error.start} is 0x{raw[error.start]:02x}); convert "
            "it, for example with iconv."
        ) from error


def json_lines(text: str, name: str) -> Iterator[tuple[str, Any]]:
    """Each line's value, after its place in the file, for messages.

    Raises:
      RequestError: a line is not JSON.
    """
    # Not splitlines(): JSON strings may hold the other line separators of Unicode.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{name}, line {number}"
        try:
            yield place, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{place} is not JSON: {error}.") from error
