"""The bytes of every token of a vocabulary in a text."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import tokenizers

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How SentencePiece names the token of a byte."""


def _byte_alphabet() -> dict[str, int]:
    """The printable characters by which byte-level BPE spells bytes (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


_BYTE_OF = _byte_alphabet()


def byte_level(token: str) -> bytes:
    """The bytes of a byte-level token; an added token is spelt as it reads."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def components(node: Any) -> Iterator[dict[str, Any]]:
    """Every part of a serialised normalizer, pre-tokenizer or decoder, parts of parts included."""
    if isinstance(node, dict):
        if "type" in node:
            yield node
        for value in node.values():
            yield from components(value)
    elif isinstance(node, list):
        for value in node:
            yield from components(value)


def token_bytes_table(
    backend: tokenizers.Tokenizer, tokens: Sequence[str | None]
) -> list[bytes | None]:
    """The bytes that each token adds to the middle of a text, according to the backend's decoder.

    Args:
      backend: the tokenizer.
      tokens: every token's string by its id; None where an id has no token.

    Returns:
      Bytes by id; None where an id has no token, or a token without text: a special token or the
      unknown token.
    """
    added = backend.get_added_tokens_decoder()
    silent = {_unknown_id(backend), *(i for i, token in added.items() if token.special)}
    decoder = backend.decoder
    parts = [] if decoder is None else list(components(json.loads(decoder.__getstate__())))
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        spell = byte_level
    else:
        spell = _Spelling(backend, bytes_fall_back="ByteFallback" in kinds)
    return [
        None if token is None or i in silent else spell(token) for i, token in enumerate(tokens)
    ]


class _Spelling:
    """Finds a token's bytes by decoding it between two others, where decoders strip nothing."""

    def __init__(self, backend: tokenizers.Tokenizer, *, bytes_fall_back: bool):
        decoder = backend.decoder
        self._decode = " ".join if decoder is None else decoder.decode
        self._bytes_fall_back = bytes_fall_back
        self._before = self._decode(["a"])
        self._after = self._decode(["a", "a"])[len(self._before) :]

    def __call__(self, token: str) -> bytes:
        if self._bytes_fall_back and (byte := BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        text = self._decode(["a", token, "a"])
        return text[len(self._before) : len(text) - len(self._after)].encode()


def _unknown_id(backend: tokenizers.Tokenizer) -> int | None:
    """The id of the token for text that the vocabulary cannot express."""
    model = backend.model
    if isinstance(model, tokenizers.models.Unigram):
        return json.loads(model.__getstate__())["unk_id"]
    token = getattr(model, "unk_token", None)
    return None if token is None else backend.token_to_id(token)
