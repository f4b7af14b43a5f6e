"""Tokenizes a piece of a text without the text before it.

A text is given as *symbols*: a `str` with a character below 256 for each byte, and a character from
256 on, `special_symbol(i)`, for each special token i of the target. So a token may end within a
character, and no text can be mistaken for a special token.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import tokenizers

from spec_jax.text.tokenizer import Tokenizer

_CHUNK = re.compile("[\x00-\xff]+|[^\x00-\xff]", re.DOTALL)
# "surrogateescape" turns bytes that are not UTF-8 into these.
_BROKEN = re.compile("[\udc80-\udcff]+|[^\udc80-\udcff]+")
# A pattern that matches at a text's start or end alone.
_ANCHORED = re.compile(r"^(\^|\\A)|(\$|\\[zZ])$")


def special_symbol(target_id: int) -> str:
    """The symbol of a target's special token."""
    return chr(256 + target_id)


def is_special(symbol: str) -> bool:
    """Whether a symbol stands for a special token, not for a byte."""
    return ord(symbol) >= 256


@dataclasses.dataclass
class Spelt:
    """Tokens, and the part of the symbols that each covers.

    Attributes:
      ids: tokens.
      starts: where each begins.
      ends: where each ends. If several tokens spell one symbol together, only the last of them
        ends after the symbol; the others end where it begins.
    """

    ids: list[int] = dataclasses.field(default_factory=list)
    starts: list[int] = dataclasses.field(default_factory=list)
    ends: list[int] = dataclasses.field(default_factory=list)

    def add(self, ids: Sequence[int], ends: Sequence[int], start: int) -> None:
        """Appends tokens that begin at `start` and follow each other."""
        self.ids += ids
        self.starts += [start, *ends[:-1]] if ids else []
        self.ends += ends

    def after(self, count: int) -> "Spelt":
        """All but the first tokens."""
        return Spelt(self.ids[count:], self.starts[count:], self.ends[count:])

    def replace(self, count: int, others: "Spelt") -> None:
        """Keeps the first tokens and replaces the others."""
        self.ids[count:] = others.ids
        self.starts[count:] = others.starts
        self.ends[count:] = others.ends


class Speller:
    """Spells symbols in one tokenizer's tokens.

    What the tokenizer adds at a text's start (a space, a first token) is added only on request.
    Special tokens come from special symbols only, never from text. Bytes that are not UTF-8 become
    byte tokens, and are left out if the vocabulary has none.

    Args:
      tokenizer: the tokenizer.
      specials: its tokens for the target's special tokens, by the target's id; the others are
        spelt out as in `literals`.
      literals: the text of the target's special tokens, by their id.
    """

    def __init__(
        self, tokenizer: Tokenizer, specials: Mapping[int, int], literals: Mapping[int, str]
    ):
        self._tokenizer = tokenizer
        self._specials = specials
        self._literals = literals
        self._symbols = {i: special_symbol(target) for target, i in specials.items()}
        self._inside = _plain_copy(tokenizer, at_start=False)

    @cached_property
    def _at_start(self) -> tokenizers.Tokenizer:
        return _plain_copy(self._tokenizer, at_start=True)

    @cached_property
    def first_ids(self) -> list[int]:
        """The tokens that the tokenizer puts before every text, such as a first token."""
        bare = self._tokenizer.encode("a", add_special_tokens=False)
        complete = self._tokenizer.encode("a")
        places = range(len(complete) - len(bare) + 1)
        start = next((i for i in places if complete[i : i + len(bare)] == bare), 0)
        return complete[:start]

    @cached_property
    def strips_first_space(self) -> bool:
        """Whether decoding drops the space of a text's first token."""
        table = enumerate(self._tokenizer.bytes_of_tokens)
        i = next((i for i, spelt in table if spelt is not None and spelt.startswith(b" ")), None)
        return i is not None and not self._tokenizer.decode([i]).startswith(" ")

    @cached_property
    def _table(self) -> list[str | None]:
        table = self._tokenizer.bytes_of_tokens
        decoded = (None if spelt is None else spelt.decode("latin-1") for spelt in table)
        return [self._symbols.get(i, symbols) for i, symbols in enumerate(decoded)]

    def symbols(self, token_id: int) -> str | None:
        """The symbols of a token; None for a special token without a counterpart in the target."""
        return self._table[token_id] if 0 <= token_id < len(self._table) else None

    def spell(self, symbols: str, offset: int = 0, *, at_start: bool = False) -> Spelt:
        """The tokens of a piece of text.

        Args:
          symbols: the piece.
          offset: of the symbols in the whole text; the result counts from the text's start.
          at_start: it begins the text, so the tokenizer adds what it adds there.
        """
        spelt = Spelt()
        for chunk in _CHUNK.finditer(symbols):
            if is_special(chunk[0][0]):
                at_start = False
                ids = self._special_ids(ord(chunk[0]) - 256)
                spelt.add(ids, [offset] * (len(ids) - 1) + [offset + 1] * bool(ids), offset)
                offset += 1
                continue
            text = chunk[0].encode("latin-1").decode("utf-8", "surrogateescape")
            for part in _BROKEN.findall(text):
                data = part.encode("utf-8", "surrogateescape")
                broken = "\udc80" <= part[0] <= "\udcff"
                if broken:
                    ids, ends = self._byte_ids(data)
                else:
                    ids, ends = self._text_ids(part, data, at_start=at_start)
                at_start = False
                spelt.add(ids, [offset + end for end in ends], offset)
                offset += len(data)
        return spelt

    def spell_all(self, pieces: Sequence[bytes]) -> list[list[int]]:
        """The tokens of each of many pieces; none for a piece that the vocabulary cannot spell."""
        texts: dict[int, str] = {}
        spelt: list[list[int]] = [[]] * len(pieces)
        for i, piece in enumerate(pieces):
            try:
                texts[i] = piece.decode()
            except UnicodeDecodeError:
                ids = self.spell(piece.decode("latin-1")).ids
                spelt[i] = ids if ids and self._covers(ids, piece) else []
        encodings = self._inside.encode_batch_fast(list(texts.values()), add_special_tokens=False)
        table = self._tokenizer.bytes_of_tokens
        for i, encoding in zip(texts, encodings, strict=True):
            ids = encoding.ids
            spelt[i] = ids if all(table[token] is not None for token in ids) else []
        return spelt

    def _special_ids(self, target_id: int) -> list[int]:
        drafter_id = self._specials.get(target_id)
        if drafter_id is not None:
            return [drafter_id]
        literal = self._literals.get(target_id, "")
        return self._inside.encode(literal, add_special_tokens=False).ids

    def _text_ids(self, text: str, data: bytes, *, at_start: bool) -> tuple[list[int], list[int]]:
        backend = self._at_start if at_start else self._inside
        encoding = backend.encode(text, add_special_tokens=False)
        ids = encoding.ids
        if (extra := self._extra(ids, data, at_start)) is not None:
            table = self._tokenizer.bytes_of_tokens
            sizes = accumulate(len(table[token] or b"") for token in ids)
            return ids, [max(size - extra, 0) for size in sizes]
        # The tokenizer rewrites text (for example composes characters), so its offsets are used.
        sizes = list(accumulate((len(character.encode()) for character in text), initial=0))
        ends = accumulate((sizes[end] for _, end in encoding.offsets), max)
        return ids, list(ends)

    def _extra(self, ids: list[int], data: bytes, at_start: bool) -> int | None:
        """Spaces that tokens put before the bytes they spell; None if they spell other bytes."""
        if self._covers(ids, data):
            return 0
        strips = at_start and self.strips_first_space
        return 1 if strips and self._covers(ids, b" " + data) else None

    def _covers(self, ids: list[int], data: bytes) -> bool:
        table = self._tokenizer.bytes_of_tokens
        parts = [table[token] for token in ids]
        return None not in parts and b"".join(part or b"" for part in parts) == data

    @cached_property
    def _ids_of_bytes(self) -> dict[bytes, int]:
        table = self._tokenizer.bytes_of_tokens
        # Backwards, so that the first of two tokens with the same text is kept.
        return {table[i] or b"": i for i in reversed(range(len(table))) if table[i]}

    def _byte_ids(self, data: bytes) -> tuple[list[int], list[int]]:
        """Tokens for bytes that are not UTF-8, the longest possible each time."""
        ids, ends, offset = [], [], 0
        while offset < len(data):
            for size in range(min(4, len(data) - offset), 0, -1):
                if (token := self._ids_of_bytes.get(data[offset : offset + size])) is not None:
                    ids.append(token)
                    ends.append(offset + size)
                    break
            else:
                size = 1
            offset += size
        return ids, ends


def _plain_copy(tokenizer: Tokenizer, *, at_start: bool) -> tokenizers.Tokenizer:
    """The backend, which adds nothing to a text and reads names of special tokens as text."""
    described = json.loads(tokenizer.to_json())
    described["post_processor"] = None
    if not at_start:
        for step in ("normalizer", "pre_tokenizer"):
            described[step] = _inside_a_text(described[step])
    backend = tokenizers.Tokenizer.from_str(json.dumps(described))
    backend.encode_special_tokens = True
    return backend


def _inside_a_text(step: Any) -> Any:
    """A serialised normalizer or pre-tokenizer without its steps at a text's start and end."""
    match step:
        case {"type": "Prepend" | "Strip"}:
            return None
        case {"type": "Replace", "pattern": {"Regex": pattern}} if _ANCHORED.search(pattern):
            return None
        case {"type": "Metaspace"}:
            return step | {"prepend_scheme": "never"}
        case {"type": "ByteLevel"}:
            return step | {"add_prefix_space": False}
        case {"type": "Sequence"}:
            name = "normalizers" if "normalizers" in step else "pretokenizers"
            parts = [_inside_a_text(part) for part in step[name]]
            return step | {name: [part for part in parts if part is not None]}
    return step
