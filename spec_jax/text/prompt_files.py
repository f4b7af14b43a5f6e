"""Files of prompts: their size is bounded, and lines of JSON are read one by one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from spec_jax.errors import RequestError

MOST_BYTES = 128 << 20
"""Of a file of prompts; a device such as /dev/zero has no end."""


def read_text(source: BinaryIO | Path, name: str) -> str:
    """The text of a file or stream.

    Args:
      source: what to read.
      name: what to call it in a message.

    Raises:
      RequestError: it cannot be read, is larger than `MOST_BYTES`, or is not UTF-8.
    """
    try:
        if isinstance(source, Path):
            with source.open("rb") as file:
                raw = file.read(MOST_BYTES + 1)
        else:
            raw = source.read(MOST_BYTES + 1)
    except OSError as error:
        raise RequestError(f"cannot read prompt file {name!r}: {error.strerror}.") from error
    if len(raw) > MOST_BYTES:
        raise RequestError(f"{name} holds more than {MOST_BYTES >> 20} MiB; split it.")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{name} is not UTF-8 text (byte {error.start} is 0x{raw[error.start]:02x}); convert "
            "it, for example with iconv."
        ) from error


def json_lines(text: str, name: str) -> Iterator[tuple[str, Any]]:
    """Each line's value, after where it stands, for messages.

    Raises:
      RequestError: a line is not JSON.
    """
    # Not splitlines(): JSON strings may hold the other line separators of Unicode.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            yield where, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{where} is not JSON: {error}.") from error
