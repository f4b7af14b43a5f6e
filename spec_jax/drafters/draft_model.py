"""An independent draft model (Chen et al. 2023, arXiv 2302.01318, section 3)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.drafters.autoregressive import autoregress
from spec_jax.drafters.base import (
    Committed,
    Context,
    Draft,
    Drafter,
    DrafterPrompt,
    PromptBlock,
)
from spec_jax.models.attention_mask import AttentionMask
from spec_jax.models.cache import KVCache
from spec_jax.models.model import Model
from spec_jax.models.prefill import prefill, take_tokens
from spec_jax.pytree import pytree, static

CATCH_UP = 16
"""Tokens that a draft model computes at a time if it has not drafted for some rounds."""


@pytree
class DraftModel(Drafter):
    """Drafts with a second, smaller model that has its own cache.

    Attributes:
      model: the draft model.
      lookahead: tokens proposed per round (K).
      num_drafts: independent drafts of each row.
      columns: the model's output for each of the target's ids, or -1 if it has none; by default
        both models share their ids.
      shares_encoder: whether the draft attends to the output of the target's encoder, like
        Distil-Whisper (arXiv 2311.00430); static.
    """

    model: Model
    lookahead: int = static()
    num_drafts: int = static(default=1)
    columns: Int[Array, " vocab"] | None = None
    shares_encoder: bool = static(default=False)
    fixed_length = True
    has_confidence = True
    can_skip_prompts = True

    def init(self, prompt: DrafterPrompt) -> KVCache:
        """An empty cache."""
        headroom = headroom_of_drafts(prompt.block, self.lookahead * self.num_drafts)
        return empty_cache(self.model, prompt.tokens, prompt, headroom, self.shares_encoder)

    def prefill(self, state: KVCache, block: PromptBlock) -> KVCache:
        """Computes the block, and the tokens before it that `copy_prefix` did not copy."""
        return prefill(self.model, self._readable(block.tokens), block.end, state, block.size)

    def copy_prefix(self, state: KVCache, other: KVCache, num_tokens: Array) -> KVCache:
        """The other rows' caches, cut to the common tokens."""
        lengths = jnp.minimum(other.lengths, num_tokens)
        if not other.can_truncate:
            lengths = jnp.where(other.lengths <= num_tokens, lengths, 0)
        return dataclasses.replace(other, lengths=lengths, encoded=state.encoded)

    def _readable(self, tokens: Int[Array, "batch length"]) -> Int[Array, "batch length"]:
        """The tokens without ids that exist only in the target's padded embedding.

        The draft's embedding has no row for such an id: it would compute NaN and stop drafting.
        """
        return jnp.minimum(tokens, self.model.config.vocab_size - 1)

    def propose(self, state: KVCache, context: Context) -> tuple[Draft, KVCache]:
        """K tokens, each drawn from the draft's own processed distribution."""
        tokens = self._readable(context.tokens)
        if not context.fixed_length:
            end = jnp.where(context.limits > 0, context.lengths - 2, 0)
            state = catch_up(self.model, tokens, end, state)
        return draft_on(
            self.model,
            tokens,
            context.lengths,
            state,
            context,
            lookahead=self.lookahead,
            num_drafts=self.num_drafts,
            columns=self.columns,
        )

    def commit(self, state: KVCache, committed: Committed) -> KVCache:
        """Rolls back to the accepted tokens; the next round's first step computes missing ones."""
        if self.num_drafts > 1:
            steps = jnp.arange(self.lookahead - 1, dtype=jnp.int32)[None]
            sources = (
                committed.before[:, None] + steps * self.num_drafts + committed.draft_index[:, None]
            )
            num_computed = jnp.maximum(state.lengths - committed.before, 0)
            state = state.gather(sources, committed.before, num_computed)
        return state.commit(jnp.minimum(state.lengths, committed.lengths - 1))


def empty_cache(
    model: Model,
    tokens: Int[Array, "batch length"],
    prompt: DrafterPrompt,
    headroom: int,
    shares_encoder: bool = False,
) -> KVCache:
    """A draft model's cache before prefill.

    Args:
      model: the draft model; if it has an encoder, it encodes the prompt's source.
      tokens: the prompts in its tokens.
      prompt: the prompts of the drafter's `init`.
      headroom: see `headroom_of_drafts`.
      shares_encoder: see `DraftModel`.
    """
    cache = model.new_cache(*tokens.shape, headroom=headroom)
    if model.config.encoder is not None:
        assert prompt.source is not None
        encoded = model.encode(prompt.source, shared=shares_encoder)[0]
        cache = dataclasses.replace(cache, encoded=encoded)
    return cache


def headroom_of_drafts(block: int, drafted: int) -> int:
    """The largest number of KV slots that a draft model's calls write past its next query.

    A call writes a block of a prompt, a block of `catch_up`, or drafted tokens after the two tokens
    of a round's first step; see `KVCache`.
    """
    return max(block, CATCH_UP, drafted + 2)


def draft_on(
    model: Model,
    tokens: Int[Array, "batch length"],
    lengths: Int[Array, " batch"],
    cache: KVCache,
    context: Context,
    *,
    lookahead: int,
    num_drafts: int = 1,
    columns: Int[Array, " vocab"] | None = None,
    drafter_ids: Int[Array, " vocab"] | None = None,
) -> tuple[Draft, KVCache]:
    """Drafts the next tokens of rows whose cache lacks one or two tokens of the text.

    The first step computes these: the last token of the text and, after a full acceptance, the last
    draft token before it. So the cache catches up without an additional call.

    Args:
      model: the draft model.
      tokens: the rows' texts in its tokens.
      lengths: the number of these tokens of each row.
      cache: the model's cache; rows with a limit of 0 may lack any number of tokens.
      context: the rows.
      lookahead: the largest number of tokens to draft; static.
      num_drafts: drafts of each row; static.
      columns: the model's output for each of the target's ids; as in `DraftModel`.
      drafter_ids: the model's input id for each of the target's ids; by default they are the same.
    """
    vocab, computed = context.sampling.logit_bias.shape[1], cache.lengths
    drafting = context.limits > 0
    num_missing = jnp.where(drafting, lengths - computed, 0)
    missing = take_tokens(tokens, computed, 2)

    def step(cache: KVCache, i: int | Array, last: Array) -> tuple[Array, KVCache]:
        if isinstance(i, int):
            out = model.score(missing, cache, num_tokens=num_missing)
            assert out.logits is not None
            at = jnp.maximum(num_missing - 1, 0)[:, None, None]
            logits = over_vocabulary(jnp.take_along_axis(out.logits, at, axis=1), vocab, columns)
            return jnp.repeat(logits, num_drafts, axis=1), out.cache
        last = last if drafter_ids is None else drafter_ids[last]
        cache = cache.with_lengths(lengths + (i - 1) * num_drafts)
        num_tokens = jnp.where(drafting, num_drafts, 0)
        if num_drafts == 1:
            out = model.score(last, cache, num_tokens=num_tokens)
        else:
            mask = _latest_of_drafts(lengths, i, lookahead, num_drafts, num_tokens)
            out = model.score(last, cache, mask)
        assert out.logits is not None
        return over_vocabulary(out.logits, vocab, columns), out.cache

    def padded_step(cache: KVCache, i: int | Array, last: Array) -> tuple[Array, KVCache]:
        """Any step, as wide as the first: one compiled copy, where padding costs nothing."""
        last = last if drafter_ids is None else drafter_ids[last]
        num_tokens = jnp.where(i == 0, num_missing, drafting.astype(jnp.int32))
        new = jnp.where(i == 0, missing, jnp.pad(last, ((0, 0), (0, 1))))
        cache = cache.with_lengths(jnp.where(i == 0, computed, lengths + i - 1))
        out = model.prefill(new, cache, num_tokens, (model.config.num_layers,))
        assert out.features is not None
        at = jnp.maximum(num_tokens - 1, 0)[:, None, None]
        hidden = jnp.take_along_axis(out.features[:, :, 0], at, axis=1)
        return over_vocabulary(model.logits(hidden), vocab, columns), out.cache

    is_padded = model.skips_padding and num_drafts == 1
    draft, cache = autoregress(
        padded_step if is_padded else step,
        cache,
        context,
        lookahead=lookahead,
        num_drafts=num_drafts,
        placement=model.placement,
        first_differs=not is_padded,
    )
    drafted = lengths + jnp.maximum(draft.lengths - 1, 0)
    return draft, cache.with_lengths(jnp.where(drafting, drafted, computed))


def _latest_of_drafts(
    lengths: Int[Array, " batch"],
    step: int | Array,
    lookahead: int,
    num_drafts: int,
    num_tokens: Int[Array, " batch"],
) -> AttentionMask:
    """The mask of the drafts' latest tokens: each sees the text and its draft."""
    drafted = jnp.arange(lookahead * num_drafts, dtype=jnp.int32)
    draft = jnp.arange(num_drafts, dtype=jnp.int32)
    same_draft = (drafted < step * num_drafts)[None] & (
        drafted[None] % num_drafts == draft[:, None]
    )
    return AttentionMask(
        positions=jnp.broadcast_to((lengths + step - 1)[:, None], (len(lengths), num_drafts)),
        start=lengths + (step - 1) * num_drafts,
        context_lengths=lengths,
        tree_mask=same_draft,
        depths=drafted // num_drafts,
        num_tokens=num_tokens,
    )


def catch_up(
    model: Model,
    tokens: Int[Array, "batch length"],
    end: Int[Array, " batch"],
    cache: KVCache,
) -> KVCache:
    """Computes tokens until each row's cache holds at least the first `end` of them."""
    return prefill(model, tokens, end, cache, min(CATCH_UP, tokens.shape[1]))


def over_vocabulary(
    logits: Float[Array, "*lead draft_vocab"], vocab: int, columns: Int[Array, " vocab"] | None
) -> Float[Array, "*lead vocab"]:
    """The draft's logits over the target's ids; -inf for ids that the draft cannot propose.

    Without `columns` both models share their ids; padding rows of an embedding have no meaning.
    """
    if columns is not None:
        shared = (columns >= 0).reshape((1,) * (logits.ndim - 1) + (-1,))
        return jnp.where(shared, jnp.take(logits, jnp.maximum(columns, 0), axis=-1), -jnp.inf)
    logits = logits[..., :vocab]
    missing = [(0, 0)] * (logits.ndim - 1) + [(0, vocab - logits.shape[-1])]
    return jnp.pad(logits, missing, constant_values=-jnp.inf)
