"""Which target tokens a drafter with another vocabulary can propose, and how it reads each token.

Token-level intersection (TLI): the drafter's distribution is restricted to the tokens that both
vocabularies have, renormalised, and mapped to the target's ids. The result is a distribution over
target tokens like any other draft's, so every verification rule stays exact; a smaller intersection
costs acceptance, never correctness. The map is one-to-one, so no probability is counted twice.

The drafter's context is the target's text in the drafter's tokens, each target token translated
separately (`spelling`). The text is the same to the byte, but not always tokenized as the drafter
would do it, so a prompt is better translated whole (`spec_jax.text.translation`).

Source: Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies", 2025 (arXiv 2502.05202), Algorithm 4.
"""

import dataclasses
from collections.abc import Sequence
from itertools import chain
from typing import Literal

import numpy as np
from jaxtyping import Int32

from spec_jax.errors import VocabularyMismatchError
from spec_jax.text.spelling import Speller
from spec_jax.text.token_bytes import BYTE_TOKEN
from spec_jax.text.tokenizer import Tokenizer

MAX_SPELLING = 16
"""Drafter tokens for one target token at most; longer spellings (runs of spaces) lose the first."""

# A token without text is identified by its name; a byte token may repeat a letter's token.
_Kind = Literal["text", "byte", "special"]


@dataclasses.dataclass(frozen=True)
class VocabularyMap:
    """How target tokens map to a drafter's outputs and inputs.

    Attributes:
      to_drafter: the drafter's output for each target id, -1 if there is none. One-to-one.
      to_target: the target id of each of the drafter's outputs, -1 if there is none.
      spelling: the drafter's input tokens for each target id, -1 after the last.
      spelling_lengths: the number of those tokens; 0 for an id that the drafter cannot read, such
        as a padding row of the target's embedding.
    """

    to_drafter: Int32[np.ndarray, " target_vocab"]
    to_target: Int32[np.ndarray, " outputs"]
    spelling: Int32[np.ndarray, "target_vocab longest"]
    spelling_lengths: Int32[np.ndarray, " target_vocab"]

    @property
    def coverage(self) -> float:
        """The share of target ids that the drafter can propose."""
        return float(np.mean(self.to_drafter >= 0))

    @classmethod
    def between(
        cls,
        target: Tokenizer,
        drafter: Tokenizer,
        *,
        target_vocab_size: int,
        drafter_vocab_size: int,
        target_name: str,
        drafter_name: str,
    ) -> "VocabularyMap":
        """The map between two tokenizers.

        Tokens match if they stand for the same bytes, special tokens if they have the same name or,
        failing that, if both end a generation.

        Args:
          target: the target's tokenizer.
          drafter: the drafter's tokenizer.
          target_vocab_size: rows of the target's embedding, padding included.
          drafter_vocab_size: rows of the drafter's embedding.
          target_name: names the target in errors.
          drafter_name: names the drafter in errors.

        Raises:
          VocabularyMismatchError: they share no token of text.
        """
        theirs = _ids_of_keys(drafter, drafter_vocab_size)
        ours = _ids_of_keys(target, target_vocab_size)
        pairs = {i: theirs[key] for key, i in ours.items() if key in theirs}
        if all(kind == "special" for kind, _ in ours.keys() & theirs.keys()):
            raise VocabularyMismatchError(
                f"the vocabularies of the draft model {drafter_name} and the target {target_name} "
                "have no token in common, so the draft cannot propose any; use method "
                "'universal_text', whose drafts are translated as text, or a draft of the "
                "target's family."
            )
        taken = set(pairs.values())
        for (kind, spelt), i in ours.items():
            # A byte may be a byte token in one vocabulary and an ordinary token in the other.
            other = theirs.get(("text" if kind == "byte" else "byte", spelt))
            if kind != "special" and i not in pairs and other is not None and other not in taken:
                pairs[i] = other
                taken.add(other)
        for i, other in special_counterparts(target, drafter).items():
            if i < target_vocab_size and other < drafter_vocab_size and other not in taken:
                pairs[i] = other
                taken.add(other)

        to_drafter = np.full(target_vocab_size, -1, np.int32)
        to_drafter[list(pairs)] = list(pairs.values())
        spelt = _spellings(target, drafter, to_drafter, drafter_vocab_size)
        lengths = np.array([len(ids) for ids in spelt], np.int32)
        spelling = np.full((target_vocab_size, max(1, lengths.max())), -1, np.int32)
        spelling[np.arange(spelling.shape[1]) < lengths[:, None]] = [*chain.from_iterable(spelt)]
        return cls(to_drafter, _inverse(to_drafter, drafter_vocab_size), spelling, lengths)

    @classmethod
    def reduced(
        cls, target_ids: np.ndarray | Sequence[int], target_vocab_size: int
    ) -> "VocabularyMap":
        """The map of a drafter that reads the target's tokens but can propose only some of them.

        Args:
          target_ids: the target id of each of the drafter's outputs. (EAGLE-3's `d2t` holds
            differences: `target_ids = d2t + arange(len(d2t))`.)
          target_vocab_size: rows of the target's embedding.

        Raises:
          VocabularyMismatchError: an id is not a row of the target's embedding, or occurs twice.
        """
        ids = np.asarray(target_ids)
        if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
            raise VocabularyMismatchError(
                f"the draft's outputs are named by an array of shape {ids.shape} and type "
                f"{ids.dtype}; give one target id, an integer, for each."
            )
        wrong = ids[(ids < 0) | (ids >= target_vocab_size)]
        if wrong.size:
            raise VocabularyMismatchError(
                f"the draft can propose token {wrong[0]}, but the target's vocabulary has "
                f"{target_vocab_size} tokens; the draft was made for another target."
            )
        values, counts = np.unique(ids, return_counts=True)
        if counts.max() > 1:
            raise VocabularyMismatchError(
                f"{counts.max()} of the draft's outputs stand for the target's token "
                f"{values[counts.argmax()]}; give each output another token."
            )
        to_target = ids.astype(np.int32)
        spelling = np.arange(target_vocab_size, dtype=np.int32)[:, None]
        lengths = np.ones(target_vocab_size, np.int32)
        return cls(_inverse(to_target, target_vocab_size), to_target, spelling, lengths)


def special_counterparts(target: Tokenizer, drafter: Tokenizer) -> dict[int, int]:
    """Maps the target's special tokens to the drafter's, as far as the drafter has them.

    They match by name. Tokens that end a generation also match by role, in the tokenizers' order.
    """
    named = {name: i for i, name in reversed(drafter.added_tokens.items())}
    specials = target.special_tokens
    pairs = {i: named[name] for i, name in specials.items() if name in named}
    ends = (i for i in target.eos_token_ids if i in specials and i not in pairs)
    free = (i for i in drafter.eos_token_ids if i not in pairs.values())
    return pairs | dict(zip(list(ends), list(free), strict=False))


def _ids_of_keys(tokenizer: Tokenizer, vocab_size: int) -> dict[tuple[_Kind, bytes], int]:
    """The kind and bytes of a token -> the first such id."""
    keys: dict[tuple[_Kind, bytes], int] = {}
    specials = tokenizer.special_tokens
    for i, spelt in enumerate(tokenizer.bytes_of_tokens[:vocab_size]):
        if i in specials:
            keys.setdefault(("special", specials[i].encode()), i)
        elif spelt:
            is_byte = len(spelt) == 1 and BYTE_TOKEN.fullmatch(tokenizer.token(i))
            keys.setdefault(("byte" if is_byte else "text", spelt), i)
    return keys


def _spellings(
    target: Tokenizer,
    drafter: Tokenizer,
    to_drafter: Int32[np.ndarray, " target_vocab"],
    drafter_vocab_size: int,
) -> list[list[int]]:
    spelt: list[list[int]] = [[i] if i >= 0 else [] for i in to_drafter.tolist()]
    table = [*target.bytes_of_tokens[: len(spelt)]]
    for i, name in target.special_tokens.items():
        if i < len(table):
            table[i] = name.encode()
    open_ids = [i for i, piece in enumerate(table) if piece and not spelt[i]]
    pieces = [table[i] or b"" for i in open_ids]
    for i, ids in zip(open_ids, Speller(drafter, {}, {}).spell_all(pieces), strict=True):
        if all(each < drafter_vocab_size for each in ids):
            spelt[i] = ids[-MAX_SPELLING:]
    return spelt


def _inverse(ids: Int32[np.ndarray, " from"], size: int) -> Int32[np.ndarray, " to"]:
    inverse = np.full(size, -1, np.int32)
    places = np.flatnonzero(ids >= 0)
    inverse[ids[places]] = places
    return inverse
