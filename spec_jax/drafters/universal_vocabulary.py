"""A drafter with another vocabulary, sampled: token-level intersection, on device.

Timor et al. 2025 (arXiv 2502.05202, algorithm 4): the drafter draws from its distribution over the
tokens that both vocabularies have, renormalised, so that the acceptance rule holds unchanged.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from spec_jax.drafters.base import (
    Committed,
    Context,
    Draft,
    Drafter,
    DrafterPrompt,
    PromptBlock,
)
from spec_jax.drafters.draft_model import (
    catch_up,
    draft_on,
    empty_cache,
    headroom_of_drafts,
)
from spec_jax.models.cache import KVCache
from spec_jax.models.model import Model
from spec_jax.models.prefill import prefill
from spec_jax.pytree import pytree, static


@pytree
class DrafterText:
    """The rows in the drafter's tokens.

    Attributes:
      tokens: prompt and output; only the first `lengths` of each row are valid.
      lengths: the number of tokens of each row.
      full: rows whose text no longer fits in `tokens`; they draft nothing more.
      cache: the drafter's cache.
    """

    tokens: Int[Array, "batch drafter_length"]
    lengths: Int[Array, " batch"]
    full: Bool[Array, " batch"]
    cache: KVCache


@pytree
class UniversalVocabulary(Drafter):
    """Drafts tokens that target and drafter share, after the text in the drafter's tokens.

    Attributes:
      model: the drafter.
      to_drafter: the drafter's id of each of the target's tokens, or -1.
      spelling: the drafter's tokens for each of the target's tokens, padded.
      spelling_lengths: how many these are.
      lookahead: tokens proposed per round (K).
    """

    model: Model
    to_drafter: Int[Array, " vocab"]
    spelling: Int[Array, "vocab spelt"]
    spelling_lengths: Int[Array, " vocab"]
    lookahead: int = static()
    fixed_length = True
    has_confidence = True

    @property
    def _reserve(self) -> int:
        """KV slots that a round may need past the text."""
        return self.lookahead + self.spelling.shape[1] + 1

    def init(self, prompt: DrafterPrompt) -> DrafterText:
        """`inputs` holds the prompts in the drafter's tokens, and their lengths."""
        if prompt.inputs is None:
            raise ValueError("a drafter with its own vocabulary needs the prompts in its tokens")
        tokens, lengths = prompt.inputs
        headroom = headroom_of_drafts(prompt.block, self.lookahead)
        cache = empty_cache(self.model, tokens, prompt, headroom)
        return self._checked(DrafterText(tokens, lengths, jnp.zeros(lengths.shape, bool), cache))

    def prefill(self, state: DrafterText, block: PromptBlock) -> DrafterText:
        """Computes a block of the drafter's tokens, and all missing ones when the prompt ends."""
        last = jnp.maximum(state.lengths - 1, 0)
        ends = block.end >= block.lengths - 1
        end = jnp.where(ends, last, jnp.minimum(last, state.cache.lengths + block.size))
        cache = prefill(self.model, state.tokens, end, state.cache, block.size)
        return dataclasses.replace(state, cache=cache)

    def copy_prefix(self, state: DrafterText, other: DrafterText, num_tokens: Array) -> DrafterText:
        """Copies nothing: the same text may have other tokens before a different end."""
        return state

    def _checked(self, text: DrafterText) -> DrafterText:
        # A write past the end would be moved back and overwrite earlier tokens.
        full = text.full | (text.lengths + self._reserve > text.tokens.shape[1])
        lengths = jnp.where(full, 1, text.lengths)
        cache = text.cache.with_lengths(jnp.where(full, 0, text.cache.lengths))
        return DrafterText(text.tokens, lengths, full, cache)

    def propose(self, state: DrafterText, context: Context) -> tuple[Draft, DrafterText]:
        """K tokens, each drawn from the drafter's processed distribution over shared tokens."""
        limits = jnp.where(state.full, 0, context.limits)
        end = jnp.where(limits > 0, state.lengths - 2, 0)
        cache = catch_up(self.model, state.tokens, end, state.cache)
        draft, cache = draft_on(
            self.model,
            state.tokens,
            state.lengths,
            cache,
            dataclasses.replace(context, limits=limits),
            lookahead=self.lookahead,
            columns=self.to_drafter,
            drafter_ids=self.to_drafter,
        )
        return draft, dataclasses.replace(state, cache=cache)

    def commit(self, state: DrafterText, committed: Committed) -> DrafterText:
        """Adds the accepted tokens and the spelling of the next token; rolls back other tokens."""
        emitted = committed.lengths - committed.before
        accepted = jnp.maximum(emitted - 1, 0)
        last = jnp.take_along_axis(committed.tokens, committed.lengths[:, None] - 1, axis=1)[:, 0]
        spelt = jnp.where(emitted > 0, self.spelling_lengths[last], 0)

        def row(drafter_ids, drafter_length, tokens, before, accepted, last):
            drafted = jax.lax.dynamic_slice_in_dim(tokens, before, self.lookahead)
            new = jnp.pad(self.to_drafter[drafted], (0, self.spelling.shape[1]))
            new = jax.lax.dynamic_update_slice_in_dim(new, self.spelling[last], accepted, axis=0)
            return jax.lax.dynamic_update_slice_in_dim(drafter_ids, new, drafter_length, axis=0)

        tokens = jax.vmap(row)(
            state.tokens, state.lengths, committed.tokens, committed.before, accepted, last
        )
        lengths = state.lengths + accepted + spelt
        # The next KV slot after the accepted tokens holds a rejected token.
        valid = jnp.minimum(state.cache.lengths, state.lengths + accepted)
        cache = state.cache.commit(jnp.minimum(lengths - 1, valid))
        return self._checked(DrafterText(tokens, lengths, state.full, cache))
