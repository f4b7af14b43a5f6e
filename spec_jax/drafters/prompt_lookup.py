"""Prompt lookup: copy what followed the latest n-gram earlier in prompt or output."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax.drafters.base import Committed, Context, Draft
from spec_jax.pytree import pytree, static


@pytree
class PromptLookup:
    """Drafts without a model, on device (Saxena 2023; Hugging Face's `prompt_lookup` semantics).

    The longest n-gram is tried first, down to one token; of its earlier places the leftmost that
    has a continuation is copied from.

    Attributes:
      lookahead: most tokens proposed (K).
      max_ngram: longest n-gram looked for.
    """

    lookahead: int = static()
    max_ngram: int = static()
    drafts = 1
    steady = False

    def init(self, tokens: Array, lengths: Array, block: int, inputs: None = None) -> None:
        """No state: the context holds all there is to look up."""

    def propose(self, state: None, context: Context) -> tuple[Draft, None]:
        """The continuation of the longest match, cut at the end of the known tokens."""
        tokens, lengths = jax.vmap(self._look_up)(context.tokens, context.lengths)
        return Draft(tokens=tokens, probs=None, lengths=lengths), state

    def commit(self, state: None, committed: Committed) -> None:
        """No state."""

    def _look_up(
        self, tokens: Int[Array, " length"], length: Int[Array, ""]
    ) -> tuple[Int[Array, " lookahead"], Int[Array, ""]]:
        # `matched[e]`: how many of the last tokens (at most max_ngram) stand right before place
        # e, counted backwards until the first difference.
        places = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        running = (places > 0) & (places < length)
        matched = jnp.zeros_like(places)
        for back in range(1, self.max_ngram + 1):
            same = jnp.roll(tokens, back) == tokens[jnp.maximum(length - back, 0)]
            running = running & same & (places >= back) & (length >= back)
            matched = matched + running.astype(jnp.int32)
        best = matched.max()
        # argmax takes the first, so the leftmost place of the longest match.
        start = jnp.argmax(matched).astype(jnp.int32)
        found = jnp.where(best > 0, jnp.minimum(self.lookahead, length - start), 0)
        padded = jnp.pad(tokens, (0, self.lookahead))
        return jax.lax.dynamic_slice_in_dim(padded, start, self.lookahead), found
