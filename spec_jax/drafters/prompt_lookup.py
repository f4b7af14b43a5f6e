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


@pytree
class Searched:
    """What is searched beside the text.

    Attributes:
      source: the encoder's input, if it is text; -1 follows it.
      predictions: where in the rows' tokens their predictions begin and end; None without any.
    """

    source: Int[Array, "batch source"] | None
    predictions: Int[Array, "batch 2"] | None


@pytree
class Text:
    """What a row's last tokens are looked for in: its text, and behind it the prediction.

    Attributes:
      tokens: both of them, and anything between.
      length: tokens of the text.
      begin: where the prediction begins, past the text.
      end: where it ends; it may be empty.
    """

    tokens: Int[Array, " length"]
    length: Int[Array, ""]
    begin: Int[Array, ""]
    end: Int[Array, ""]

    @classmethod
    def alone(cls, tokens: Int[Array, " length"], length: Int[Array, ""]) -> "Text":
        """A text without a prediction."""
        end = jnp.int32(tokens.shape[0])
        return cls(tokens, length, end, end)

    @property
    def places(self) -> Int[Array, " length"]:
        """The place of each token."""
        return jnp.arange(self.tokens.shape[0], dtype=jnp.int32)

    @property
    def first(self) -> Int[Array, " length"]:
        """For each place the begin of the part that it belongs to."""
        return jnp.where(self.places < self.length, 0, self.begin)

    @property
    def past(self) -> Int[Array, " length"]:
        """For each place the end of the part that it belongs to."""
        return jnp.where(self.places < self.length, self.length, self.end)


@pytree
class PromptLookup(Drafter):
    """Drafts without a model, on device (Saxena 2023; Hugging Face's `prompt_lookup` semantics).

    The longest n-gram is tried first, down to one token. The leftmost earlier occurrence that has a
    continuation is copied from. Further drafts come from the next occurrences in this order whose
    continuations are not prefixes of an earlier draft. An encoder's input is searched too, as if it
    stood before the decoder's text.

    So is a prediction, before the text: of matches of one length, its own come first. The first
    draft of an output is how the prediction begins.

    Attributes:
      lookahead: the largest number of tokens proposed (K).
      max_ngram: the longest n-gram looked for.
      num_drafts: the largest number of continuations proposed side by side.
    """

    lookahead: int = static()
    max_ngram: int = static()
    num_drafts: int = static(default=1)
    uses_predictions = True

    def init(self, prompt: DrafterPrompt) -> Searched:
        """The state: what is searched beside the text."""
        source, searched = prompt.source, None
        if source is not None and source.values.ndim == 2:
            values = jnp.pad(source.values, ((0, 0), (0, 1)))
            positions = jnp.arange(values.shape[1], dtype=jnp.int32)[None]
            searched = jnp.where(positions < source.lengths[:, None], values, -1)
        return Searched(searched, prompt.predictions)

    def propose(self, state: Searched, context: Context) -> tuple[Draft, Searched]:
        """The continuations of the longest matches, cut at the end of the text."""
        tokens, lengths = context.tokens, context.lengths
        end = jnp.full_like(lengths, tokens.shape[1])
        begin = end
        if state.predictions is not None:
            begin, end = state.predictions[:, 0], state.predictions[:, 1]
            # A round writes its draft behind the text, whatever is accepted of it.
            begin = jnp.minimum(jnp.maximum(begin, lengths + self.lookahead + 1), end)
        begins_output = lengths == context.prompt_lengths
        if state.source is not None:
            size = state.source.shape[1]
            tokens = jnp.concatenate([state.source, tokens], axis=1)
            lengths, begin, end = lengths + size, begin + size, end + size
        tokens, lengths = if_drafting(
            context,
            self.lookahead * self.num_drafts,
            functools.partial(jax.vmap(self._look_up), tokens, lengths, begin, end, begins_output),
        )
        if state.source is not None:  # nothing is copied across the end of the source
            has_token = (tokens >= 0).reshape(len(tokens), -1, self.num_drafts).any(-1)
            leading = jnp.cumprod(has_token.astype(jnp.int32), axis=1).sum(-1, dtype=jnp.int32)
            lengths = jnp.minimum(lengths, leading)
        return Draft(tokens=tokens, probs=None, lengths=lengths, num_drafts=self.num_drafts), state

    def _look_up(
        self,
        tokens: Int[Array, " length"],
        length: Int[Array, ""],
        begin: Int[Array, ""],
        end: Int[Array, ""],
        begins_output: Bool[Array, ""],
    ) -> tuple[Int[Array, " drafted"], Int[Array, ""]]:
        text = Text(tokens, length, begin, end)
        matched = match_lengths(text, self.max_ngram)
        is_predicted = text.places >= text.length
        ranks = jnp.where(matched > 0, 2 * matched + is_predicted.astype(jnp.int32), 0)
        begins = begins_output & (text.places == text.begin) & (text.begin < text.end)
        ranks = jnp.where(begins, 2 * self.max_ngram + 2, ranks)
        if self.num_drafts == 1:
            return continuation(text, ranks, self.lookahead)
        steps = jnp.arange(self.lookahead, dtype=jnp.int32)
        several, longest = [], jnp.int32(0)
        for _ in range(self.num_drafts):
            draft, length_of_draft = continuation(text, ranks, self.lookahead)
            draft = jnp.where(steps < length_of_draft, draft, -1)
            ranks = jnp.where(copies_at(text, draft), 0, ranks)
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


def match_lengths(text: Text, max_ngram: int) -> Int[Array, " length"]:
    """How many of the row's last tokens (at most `max_ngram`) occur right before each place.

    They are counted backwards up to the first difference, or to the begin of the place's part.
    Places at which nothing can be copied have 0.
    """
    places, first, length = text.places, text.first, text.length
    running = (places > first) & (places < text.past)
    matched = jnp.zeros_like(places)
    for back in range(1, max_ngram + 1):
        same = jnp.roll(text.tokens, back) == text.tokens[jnp.maximum(length - back, 0)]
        running = running & same & (places >= first + back) & (length >= back)
        matched = matched + running.astype(jnp.int32)
    return matched


def continuation(
    text: Text, ranks: Int[Array, " length"], lookahead: int
) -> tuple[Int[Array, " lookahead"], Int[Array, ""]]:
    """The tokens at the leftmost place of the highest rank, and how many of them there are.

    Places of rank 0 do not match.
    """
    start = argmax(ranks)
    left = text.past[start] - start
    length_of_draft = jnp.where(ranks.max() > 0, jnp.minimum(lookahead, left), 0)
    padded = jnp.pad(text.tokens, (0, lookahead))
    return jax.lax.dynamic_slice_in_dim(padded, start, lookahead), length_of_draft


def copies_at(text: Text, draft: Int[Array, " lookahead"]) -> Bool[Array, " length"]:
    """Whether a draft, padded with -1, holds all tokens that it could copy at each place."""
    places, past = text.places, text.past
    same = jnp.ones(text.tokens.shape, bool)
    for step in range(draft.shape[0]):
        same = same & ((jnp.roll(text.tokens, -step) == draft[step]) | (places + step >= past))
    return same
