"""A draft that reads its target's features: what the target's last block gave out at each token.

EAGLE (Li et al. 2024, arXiv 2401.15077, section 4): beside each token the draft reads the target's
state at the token before. Past the known text, where the target has none, it reads its own.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.decoding.cache import KVCache, by_blocks
from spec_jax.drafters.autoregressive import autoregress
from spec_jax.drafters.base import Committed, Context, Draft
from spec_jax.drafters.draft_model import catch_up, over_vocabulary, slices, states_before
from spec_jax.models.model import Model
from spec_jax.pytree import pytree, static


@pytree
class FeatureDraft:
    """Drafts with a small model that reads the target's states, and has its own cache.

    Attributes:
      model: the draft model; its config says `reads_states`.
      lookahead: tokens proposed per round (K).
      columns: as in `DraftModel`.
    """

    model: Model
    lookahead: int = static()
    columns: Int[Array, " vocab"] | None = None
    drafts = 1
    steady = True

    @property
    def _window(self) -> int:
        """Latest tokens that a round's first step reads.

        Those of the last round's draft that were accepted were read beside the draft's own states;
        now there are the target's.
        """
        return self.lookahead + 1

    def init(
        self,
        tokens: Int[Array, "batch length"],
        lengths: Int[Array, " batch"],
        block: int,
        inputs: None = None,
    ) -> KVCache:
        """An empty cache."""
        return self.model.new_cache(*tokens.shape)

    def read_prompts(
        self,
        state: KVCache,
        tokens: Int[Array, "batch length"],
        lengths: Int[Array, " batch"],
        states: Float[Array, "batch length embed"],
        block: int,
    ) -> KVCache:
        """The draft's cache of the prompts."""

        def read(start: Array, piece: Array, cache: KVCache) -> KVCache:
            starts = jnp.full_like(lengths, start)
            before = states_before(states, starts, block)
            return self.model.extend(piece, cache.with_lengths(starts), before)

        state = by_blocks(read, self._readable(tokens), lengths, state, block)
        return state.with_lengths(jnp.maximum(lengths - self._window, 0))

    def _readable(self, tokens: Int[Array, "batch length"]) -> Int[Array, "batch length"]:
        return jnp.minimum(tokens, self.model.config.vocab_size - 1)  # as in `DraftModel`

    def commit(self, state: KVCache, committed: Committed) -> KVCache:
        """Keeps all but what the next round's first step reads."""
        return state.with_lengths(jnp.clip(committed.lengths - self._window, 0, state.lengths))

    def propose(self, state: KVCache, context: Context) -> tuple[Draft, KVCache]:
        """K tokens, each drawn from the draft's own processed distribution."""
        assert context.states is not None  # the loop keeps them for a `StateReader`
        model, states, lengths = self.model, context.states, context.lengths
        tokens, vocab = self._readable(context.tokens), context.sampling.logit_bias.shape[1]
        drafting = jnp.ones_like(lengths, bool) if context.limits is None else context.limits > 0
        if context.limits is not None:
            wanted = jnp.where(drafting, lengths - self._window, 0)
            state = catch_up(model, tokens, wanted, state, states)
        start = jnp.maximum(lengths - self._window, 0)

        def step(
            carry: tuple[KVCache, Array], i: int | Array, last: Array
        ) -> tuple[Array, tuple[KVCache, Array]]:
            cache, own = carry
            if isinstance(i, int):
                window = slices(tokens, start, self._window)
                before = states_before(states, start, self._window)
                cache, layers = cache.with_lengths(start), model.config.num_layers
                found, cache = model.begin(window, cache, layers, states=before)
                own = jnp.take_along_axis(found, (lengths - 1 - start)[:, None, None], axis=1)
                logits = model.exit(own)
            else:
                cache = cache.with_lengths(lengths + i - 1)
                logits, own, cache = model.score_and_states(last, cache, states=own)
            return over_vocabulary(logits, vocab, self.columns), (cache, own)

        own = jnp.zeros((len(lengths), 1, model.config.embed_size), jnp.float32)
        known = state.lengths
        draft, (cache, _) = autoregress(step, (state, own), context, lookahead=self.lookahead)
        return draft, cache.with_lengths(jnp.where(drafting, lengths, known))
