"""Suffix lookup: copies the tokens after the longest match in the outputs of earlier requests."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax.drafters.base import Context, Draft, Drafter, DrafterPrompt
from spec_jax.drafters.prompt_lookup import Text, continuation, if_drafting, match_lengths
from spec_jax.pytree import pytree, static
from spec_jax.sampling.draw import argmax

MIN_NGRAM = 2
"""Tokens that must match: the continuation of a single token seldom repeats."""
MAX_OCCURRENCES = 16
"""How many occurrences of a match are compared with each other."""


@pytree
class PastText:
    """The past outputs that each row may search besides its own text.

    Attributes:
      tokens: outputs one after another, each followed by -1, with -1 as padding.
      order: the suffix array: positions of their tokens, sorted by the suffixes that start there.
      counts: how many positions there are.
      stored: the begin in `StoredText` of the part that the row may search, and the positions
        there.
    """

    tokens: Int[Array, "batch size"]
    order: Int[Array, "batch size"]
    counts: Int[Array, " batch"]
    stored: Int[Array, "batch 2"] | None = None


@pytree
class StoredText:
    """Outputs that all rows share, each row a part of them; as in `PastText`.

    Attributes:
      tokens: outputs one after another, each followed by -1.
      order: in each part, its suffix array.
    """

    tokens: Int[Array, " size"]
    order: Int[Array, " size"]


@pytree
class SuffixLookup(Drafter):
    """Drafts without a model, on device, from past outputs and the row's own text.

    After SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975). It copies from the source with the
    longest match of the row's end; of equally long ones the row's own text comes first, then the
    past outputs, then the stored ones.

    Attributes:
      lookahead: the largest number of tokens proposed (K).
      max_ngram: the longest match looked for.
      stored: what is searched besides.
    """

    lookahead: int = static()
    max_ngram: int = static(default=16)
    stored: StoredText | None = None

    def init(self, prompt: DrafterPrompt) -> PastText:
        """The arrays that `SuffixIndex.arrays` made for the requests; they never change."""
        if prompt.inputs is None:
            raise ValueError("a drafter that searches past outputs needs their suffix arrays")
        return PastText(*prompt.inputs)

    def propose(self, state: PastText, context: Context) -> tuple[Draft, PastText]:
        """The continuation of the longest match, cut at the end of the text that contains it."""
        look_up = functools.partial(jax.vmap(self._look_up), context.tokens, context.lengths, state)
        tokens, lengths = if_drafting(context, self.lookahead, look_up)
        return Draft(tokens=tokens, probs=None, lengths=lengths), state

    def _look_up(
        self,
        tokens: Int[Array, " length"],
        length: Int[Array, ""],
        past: PastText,
    ) -> tuple[Int[Array, " lookahead"], Int[Array, ""]]:
        row = Text.alone(tokens, length)
        matched = match_lengths(row, self.max_ngram)
        matched = jnp.where(matched >= MIN_NGRAM, matched, 0)
        draft, best = continuation(row, matched, self.lookahead), matched.max()
        searched = [(past.tokens, past.order, jnp.stack([jnp.int32(0), past.counts]))]
        if self.stored is not None and past.stored is not None:
            searched.append((self.stored.tokens, self.stored.order, past.stored))
        for text, order, part in searched:
            size, low, high = longest_match(tokens, length, text, order, part, self.max_ngram)
            other = likeliest(text, order, low, high, size, self.lookahead)
            draft = jax.tree.map(functools.partial(jnp.where, size > best), other, draft)
            best = jnp.maximum(best, size)
        return draft


def longest_match(
    tokens: Int[Array, " length"],
    length: Int[Array, ""],
    text: Int[Array, " size"],
    order: Int[Array, " size"],
    part: Int[Array, "2"],
    max_ngram: int,
) -> tuple[Int[Array, ""], Int[Array, ""], Int[Array, ""]]:
    """The size of the longest n-gram at the row's end that has a continuation in the text, or 0.

    Also its occurrences, as a range of `order`. One binary search of size.bit_length() steps looks
    for all sizes at once.

    Args:
      tokens: the row.
      length: of the row.
      text: what is searched.
      order: suffix arrays of parts of it.
      part: where in `order` the suffix array to search begins, and how many positions it has.
      max_ngram: the longest n-gram; static.
    """
    sizes = jnp.arange(MIN_NGRAM, max_ngram + 1, dtype=jnp.int32)
    steps = jnp.arange(max_ngram + 1, dtype=jnp.int32)
    inside, compared = steps[None] < sizes[:, None], steps[None] <= sizes[:, None]
    ngrams = tokens[jnp.maximum(length - sizes[:, None] + steps[None], 0)]
    # The lower bound is the n-gram followed by the smallest token, which leaves out occurrences at
    # the end of an output; the upper bound is the n-gram followed by more than any token.
    following = jnp.array([0, jnp.iinfo(jnp.int32).max], jnp.int32)[:, None, None]
    bound_tokens = jnp.where(inside[None], ngrams[None], following)

    def halve(_, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) // 2
        at = order[jnp.minimum(middle, len(order) - 1)][..., None] + steps[None, None]
        here = text[jnp.minimum(at, len(text) - 1)]
        differs = (here != bound_tokens) & compared[None]
        first = differs & (jnp.cumsum(differs, axis=-1, dtype=jnp.int32) == 1)
        below = (first & (here < bound_tokens)).any(-1) & (low < high)
        return jnp.where(below, middle + 1, low), jnp.where(below, high, middle)

    bounds = tuple(jnp.full((2, len(sizes)), end) for end in (part[0], part[0] + part[1]))
    (low, high), _ = jax.lax.fori_loop(0, len(order).bit_length(), halve, bounds)
    matched_sizes = jnp.where((high > low) & (sizes <= length), sizes, 0)
    best = argmax(matched_sizes)
    return matched_sizes[best], low[best], high[best]


def likeliest(
    text: Int[Array, " size"],
    order: Int[Array, " size"],
    low: Int[Array, ""],
    high: Int[Array, ""],
    size: Int[Array, ""],
    lookahead: int,
) -> tuple[Int[Array, " lookahead"], Int[Array, ""]]:
    """The best continuation of an n-gram of `size` tokens at `order[low:high]`.

    It compares up to `MAX_OCCURRENCES` evenly spaced occurrences and takes the continuation that
    shares most tokens with all of them. If the row continues like one of them, this continuation
    has the largest expected number of accepted tokens.
    """
    occurrences = high - low
    index = jnp.arange(MAX_OCCURRENCES, dtype=jnp.int32)
    spread = (2 * index + 1) * occurrences // (2 * MAX_OCCURRENCES)
    at = low + jnp.where(occurrences > MAX_OCCURRENCES, spread, index)
    starts = order[jnp.minimum(at, len(order) - 1)] + size
    steps = jnp.arange(lookahead, dtype=jnp.int32)
    texts = text[jnp.minimum(starts[:, None] + steps[None], len(text) - 1)]
    inside = jnp.cumprod((texts >= 0).astype(jnp.int32), axis=-1)
    same = (texts[:, None] == texts[None]).astype(jnp.int32) * inside[:, None]
    common = jnp.cumprod(same, axis=-1).sum(-1, dtype=jnp.int32)
    there = index < occurrences
    agreement = jnp.where(there[None], common, 0).sum(-1, dtype=jnp.int32)
    best = argmax(jnp.where(there, agreement, -1))
    num_tokens = jnp.where(size > 0, inside[best].sum(dtype=jnp.int32), 0)
    return jnp.maximum(texts[best], 0), num_tokens
