"""Prompt lookup: copies the tokens after an earlier occurrence of the last n-gram."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from spec_jax.control import in_place_if
from spec_jax.drafters.base import Context, Draft, Drafter, DrafterPrompt
from spec_jax.pytree import pytree, static
from spec_jax.sampling.draw import argmax

Searched = Int[Array, "batch source"] | None


@pytree
class PromptLookup(Drafter):
    """Drafts without a model, on device (Saxena 2023; Hugging Face's `prompt_lookup` semantics).

    The longest n-gram is tried first, down to one token. The leftmost earlier occurrence that has a
    continuation is copied from. Further drafts come from the next occurrences in this order whose
    continuations are not prefixes of an earlier draft. An encoder's input is searched too, as if it
    stood before the decoder's text.

    Attributes:
      lookahead: the largest number of tokens proposed (K).
      max_ngram: the longest n-gram looked for.
      num_drafts: the largest number of continuations proposed side by side.
    """

    lookahead: int = static()
    max_ngram: int = static()
    num_drafts: int = static(default=1)

    def init(self, prompt: DrafterPrompt) -> Searched:
        """The state is the source in tokens, if there is one; -1 follows it."""
        source = prompt.source
        if source is None or source.values.ndim == 3:
            return None
        values = jnp.pad(source.values, ((0, 0), (0, 1)))
        positions = jnp.arange(values.shape[1], dtype=jnp.int32)[None]
        return jnp.where(positions < source.lengths[:, None], values, -1)

    def propose(self, state: Searched, context: Context) -> tuple[Draft, Searched]:
        """The continuations of the longest matches, cut at the end of the text."""
        tokens, lengths = context.tokens, context.lengths
        if state is not None:
            tokens, lengths = jnp.concatenate([state, tokens], axis=1), lengths + state.shape[1]
        tokens, lengths = if_drafting(
            context,
            self.lookahead * self.num_drafts,
            functools.partial(jax.vmap(self._look_up), tokens, lengths),
        )
        if state is not None:  # nothing is copied across the end of the source
            has_token = (tokens >= 0).reshape(len(tokens), -1, self.num_drafts).any(-1)
            leading = jnp.cumprod(has_token.astype(jnp.int32), axis=1).sum(-1, dtype=jnp.int32)
            lengths = jnp.minimum(lengths, leading)
        return Draft(tokens=tokens, probs=None, lengths=lengths, num_drafts=self.num_drafts), state

    def _look_up(
        self, tokens: Int[Array, " length"], length: Int[Array, ""]
    ) -> tuple[Int[Array, " drafted"], Int[Array, ""]]:
        matched = match_lengths(tokens, length, self.max_ngram)
        if self.num_drafts == 1:
            return continuation(tokens, length, matched, self.lookahead)
        steps = jnp.arange(self.lookahead, dtype=jnp.int32)
        several, longest = [], jnp.int32(0)
        for _ in range(self.num_drafts):
            draft, length_of_draft = continuation(tokens, length, matched, self.lookahead)
            draft = jnp.where(steps < length_of_draft, draft, -1)
            matched = jnp.where(copies_at(tokens, length, draft), 0, matched)
            several.append(draft)
            longest = jnp.maximum(longest, length_of_draft)
        return jnp.stack(several, axis=1).reshape(-1), longest


def if_drafting(
    context: Context, count: int, look_up: Callable[[], tuple[Array, Array]]
) -> tuple[Int[Array, "batch drafted"], Int[Array, " batch"]]:
    """The tokens and lengths that `look_up` finds, or none if no row may draft.

    So a round of a policy that has chosen not to draft costs no search.
    """
    if context.fixed_length:
        return look_up()
    batch = context.lengths.shape[0]
    nothing = jnp.zeros((batch, count), jnp.int32), jnp.zeros((batch,), jnp.int32)
    return in_place_if((context.limits > 0).any(), lambda _: look_up(), nothing)


def match_lengths(
    tokens: Int[Array, " length"], length: Int[Array, ""], max_ngram: int
) -> Int[Array, " length"]:
    """How many of the row's last tokens (at most `max_ngram`) occur right before each position.

    They are counted backwards up to the first difference; positions at or past `length` have 0.
    """
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    running = (positions > 0) & (positions < length)
    matched = jnp.zeros_like(positions)
    for back in range(1, max_ngram + 1):
        same = jnp.roll(tokens, back) == tokens[jnp.maximum(length - back, 0)]
        running = running & same & (positions >= back) & (length >= back)
        matched = matched + running.astype(jnp.int32)
    return matched


def continuation(
    tokens: Int[Array, " length"],
    length: Int[Array, ""],
    matched: Int[Array, " length"],
    lookahead: int,
) -> tuple[Int[Array, " lookahead"], Int[Array, ""]]:
    """The tokens after the leftmost longest match, and how many of them are in the text."""
    start = argmax(matched)
    length_of_draft = jnp.where(matched.max() > 0, jnp.minimum(lookahead, length - start), 0)
    padded = jnp.pad(tokens, (0, lookahead))
    return jax.lax.dynamic_slice_in_dim(padded, start, lookahead), length_of_draft


def copies_at(
    tokens: Int[Array, " length"], length: Int[Array, ""], draft: Int[Array, " lookahead"]
) -> Bool[Array, " length"]:
    """Whether a draft, padded with -1, holds all tokens that it could copy at each position."""
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    same = jnp.ones(tokens.shape, bool)
    for step in range(draft.shape[0]):
        same = same & ((jnp.roll(tokens, -step) == draft[step]) | (positions + step >= length))
    return same
