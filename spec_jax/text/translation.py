"""Drafts from another tokenizer, translated as text (universal assisted generation).

The drafter reads the target's text in its own tokens and drafts its continuation, which is then
tokenized again as the target's tokens. What is guaranteed:

- The target's known tokens never change: a translation only proposes tokens to follow them.
- The drafter's tokens spell the target's text byte for byte, also where a token ends within a
  character, unless its tokenizer itself rewrites or cannot express the text (then it reads its own
  version of that text).
- Proposed tokens spell exactly the drafted text, under the same condition, tokenized as the target
  would tokenize the text that ends with them. They are a deterministic draft: every verification
  rule that takes one is lossless with them, so a poor translation costs speed, never correctness.
- Each step looks at `LOOK_BEHIND` tokens and the new ones, however long the text.

Both directions work on bytes and the offset of every token in the text (`spec_jax.text.spelling`).
So special tokens stay special tokens, text that looks like one stays text, and two tokens count as
the same only if their offsets are the same too, which a comparison of ids alone cannot check.

Source: Hugging Face, "Universal Assisted Generation" (`target_lookbehind`, `assistant_lookbehind`).
"""

import dataclasses
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import takewhile

import numpy as np

from spec_jax.text.spelling import Speller, Spelt, special_symbol
from spec_jax.text.tokenizer import Tokenizer
from spec_jax.text.vocabulary import special_counterparts

LOOK_BEHIND = 10
"""Known target tokens that are read again in each step, because new text may join their words."""


@dataclasses.dataclass(frozen=True)
class Revision:
    """How the drafter's tokens changed.

    Attributes:
      num_kept: the number of first tokens that are unchanged; a cache is rolled back to them.
      ids: the tokens that now follow.
    """

    num_kept: int
    ids: list[int]


class TextTranslator:
    """Translates between a target's and a drafter's tokens; one for all rows of a batch.

    Args:
      target: the target's tokenizer.
      drafter: the drafter's tokenizer.
    """

    def __init__(self, target: Tokenizer, drafter: Tokenizer):
        names = target.special_tokens
        pairs = special_counterparts(target, drafter)
        self.target = Speller(target, {i: i for i in names}, names)
        self.drafter = Speller(drafter, pairs, names)
        # The drafter reads other special tokens as text, and may draft them as text.
        self._spelt_out = {name: i for i, name in names.items() if i not in pairs and name}
        bos = target.bos_token_id
        self._bos = [bos] if self.target.strips_first_space and bos is not None else []

    def row(self) -> "RowTranslation":
        """The translation of one text, empty at first."""
        return RowTranslation(self)

    def encode_prompt(self, target_ids: Sequence[int]) -> list[int]:
        """A whole prompt in the drafter's tokens, as the drafter would tokenize the text.

        The target's special tokens become the drafter's of the same name, or of the same role, or
        are spelt out as text. The target's first tokens of every text are replaced by the
        drafter's.
        """
        return self.row().extend(target_ids).ids

    def without_first_ids(self, target_ids: Sequence[int]) -> Sequence[int]:
        """A target's text without the tokens that its tokenizer puts before every text."""
        first = self.target.first_ids or self._bos
        has_first = bool(first) and list(target_ids[: len(first)]) == first
        return target_ids[len(first) :] if has_first else target_ids

    @cached_property
    def _literals(self) -> re.Pattern[str] | None:
        names = sorted((name.encode().decode("latin-1") for name in self._spelt_out), key=len)
        return re.compile("|".join(map(re.escape, reversed(names)))) if names else None

    def with_special_symbols(self, symbols: str) -> str:
        """Drafted symbols, with special tokens that were drafted as text made special again."""
        if self._literals is None:
            return symbols

        def special(match: re.Match[str]) -> str:
            return special_symbol(self._spelt_out[match[0].encode("latin-1").decode()])

        return self._literals.sub(special, symbols)


class RowTranslation:
    """One row's text in both tokenizers' tokens; made by `TextTranslator.row`.

    Call `extend` with what is new in the target's text, let the drafter draft after `drafter_ids`,
    and call `propose` with what it drafted.
    """

    def __init__(self, translator: TextTranslator):
        self._translator = translator
        self._pieces: list[str] = []  # the symbols of each known target token
        self._ends: list[int] = []  # and where they end
        self._first: list[int] = []  # what the drafter puts before every text
        self._spelt = Spelt()  # the text in the drafter's tokens
        self._drafted: list[int] = []
        self._begun = False  # with a first call
        self.has_text = False  # with a first token that is text, or the space before all text

    @property
    def drafter_ids(self) -> list[int]:
        """The known text in the drafter's tokens."""
        return [*self._first, *self._spelt.ids]

    def extend(self, target_ids: Sequence[int]) -> Revision:
        """Takes the target's next tokens, and revises the drafter's.

        Args:
          target_ids: the tokens that the target's text has gained; in the first call, all of it.

        Returns:
          How the drafter's tokens changed, including those that it drafted last.
        """
        num_known, length, spelt = len(self._pieces), self.length, self._spelt
        drafted, count = self._drafted, len(spelt.ids)
        self._learn(target_ids if self._begun else self._translator.without_first_ids(target_ids))
        self._take_agreeing_drafts(length)
        self._drafted = []

        start = self._window_start(num_known)
        again = self._translator.drafter.spell(self._since(start), start, at_start=start == 0)
        first_id = bisect_left(spelt.starts, start)
        old_ids = [*spelt.ids[first_id:count], *drafted]
        i, j, same = longest_diagonal(spelt.after(first_id), again)
        spelt.replace(first_id + i + same, again.after(j + same))

        if not self._begun:
            self._begun = True
            first = self._translator.drafter.first_ids
            self._first = [] if spelt.ids[: len(first)] == first else first
            return Revision(0, self.drafter_ids)
        num_kept = first_id + _agreeing(old_ids, spelt.ids[first_id:])
        return Revision(len(self._first) + num_kept, spelt.ids[num_kept:])

    def propose(self, drafted_ids: Sequence[int]) -> list[int]:
        """The target's tokens for drafted tokens.

        Args:
          drafted_ids: what the drafter drafted after `drafter_ids`; this replaces earlier drafts
            since the last `extend`.

        Returns:
          Tokens to follow the known ones; none if the target cannot spell the draft. They end
          before the first token that the target has no match for.
        """
        self._drafted = list(drafted_ids)
        symbols = "".join(self._drafted_symbols())
        symbols = self._translator.with_special_symbols(symbols)
        speller, length = self._translator.target, self.length
        start = self._start_of(len(self._pieces) - LOOK_BEHIND)
        at_start = start == 0 and (length > 0 or not self.has_text)
        spelt = speller.spell(self._since(start) + symbols, start, at_start=at_start)
        first = bisect_left(spelt.starts, length)
        if first and spelt.ends[first - 1] > length:
            # The known tokens end where the target's own tokenization would not: start anew there.
            spelt, first = speller.spell(symbols, length), 0
        return [*takewhile(lambda i: speller.symbols(i) is not None, spelt.ids[first:])]

    @property
    def length(self) -> int:
        """Characters of the row so far."""
        return self._ends[-1] if self._ends else 0

    def _start_of(self, token: int) -> int:
        """Where a known target token starts."""
        return self._ends[token - 1] if token > 0 else 0

    def _learn(self, target_ids: Sequence[int]) -> None:
        for i in target_ids:
            piece = self._translator.target.symbols(int(i)) or ""
            if not self.has_text and self._translator.target.strips_first_space:
                self.has_text = bool(piece)
                piece = piece.removeprefix(" ")
            self._pieces.append(piece)
            self._ends.append(self.length + len(piece))

    def _since(self, offset: int) -> str:
        """The known text's symbols from an offset on."""
        token = bisect_right(self._ends, offset)
        return "".join(self._pieces[token:])[offset - self._start_of(token) :]

    def _drafted_symbols(self) -> Iterator[str]:
        speller, at_start = self._translator.drafter, not self.length
        for i in self._drafted:
            piece = speller.symbols(i)
            if not piece:
                return
            if at_start and speller.strips_first_space:
                piece = piece.removeprefix(" ")
            at_start = False
            yield piece

    def _take_agreeing_drafts(self, offset: int) -> None:
        """Adds drafted tokens to the drafter's text, as far as the target's text agrees."""
        text, start = self._since(offset), offset
        for i, piece in zip(self._drafted, self._drafted_symbols(), strict=False):
            if not text.startswith(piece, offset - start):
                return
            self._spelt.add([i], [offset + len(piece)], offset)
            offset += len(piece)

    def _window_start(self, num_known: int) -> int:
        """Where to tokenize again from: a drafter's token that starts before the last known tokens.

        If that is within a character, the drafter's tokens are bytes there, as before.
        """
        starts, ends = self._spelt.starts, self._spelt.ends
        offset = self._start_of(num_known - LOOK_BEHIND)
        token = bisect_right(starts, offset) - 1
        return starts[token] if token >= 0 and starts[token] < offset < ends[token] else offset


def _agreeing(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens two sequences have in common."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def longest_diagonal(old: Spelt, new: Spelt) -> tuple[int, int, int]:
    """The longest run of tokens that two spellings of a text have in common, at the same offset.

    Returns:
      Where it starts in each of them, and its length; of equally long runs, the last.
    """
    best = 0, 0, 0
    run = np.zeros(len(new.ids) + 1, np.int64)  # the run that ends before each new token
    for i in range(len(old.ids)):
        same = np.array(new.ids, np.int64) == old.ids[i]
        same &= np.array(new.starts, np.int64) == old.starts[i]
        same &= np.array(new.ends, np.int64) == old.ends[i]
        run[1:] = np.where(same, run[:-1] + 1, 0)
        j = int(run.argmax())
        if run[j] >= best[2] and run[j]:
            length = int(run[j])
            best = i + 1 - length, j - length, length
    return best
