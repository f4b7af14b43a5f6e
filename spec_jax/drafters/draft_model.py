"""An independent draft model (Chen et al. 2023, arXiv 2302.01318, section 3)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.decoding.cache import KVCache, prefill
from spec_jax.decoding.processors import History
from spec_jax.decoding.sampling import draw, probabilities
from spec_jax.drafters.base import Context, Draft
from spec_jax.models.transformer import Model
from spec_jax.pytree import pytree, static


@pytree
class DraftModel:
    """Drafts with a second, smaller model that has its own cache.

    Attributes:
      model: the draft model.
      lookahead: tokens proposed per round (K).
    """

    model: Model
    lookahead: int = static()

    def init(
        self, tokens: Int[Array, "batch length"], lengths: Int[Array, " batch"], block: int
    ) -> KVCache:
        """The draft's cache of the prompts."""
        cache = self.model.new_cache(*tokens.shape)
        return self.commit(prefill(self.model.extend, tokens, lengths, cache, block), lengths)

    def commit(self, state: KVCache, lengths: Int[Array, " batch"]) -> KVCache:
        """Keeps all but the last two tokens, which the next round's first step reads again."""
        return state.with_lengths(jnp.maximum(lengths - 2, 0))

    def propose(self, state: KVCache, context: Context) -> tuple[Draft, KVCache]:
        """K tokens, each drawn from the draft's own processed distribution.

        The first step reads the last two tokens. The earlier one is, after a full acceptance, the
        token that the draft proposed last and never read, so the cache catches up without a call
        of its own; otherwise it is read twice, which costs little where a step is bound by the
        weights' bandwidth.
        """
        sampling = context.sampling
        vocab = sampling.logit_bias.shape[1]
        history = History.of(context.tokens, context.lengths, context.prompt_lengths, sampling)
        nothing = jnp.zeros((context.lengths.shape[0], 0), jnp.int32)

        def step(carry: tuple[Array, KVCache, History], i: Array, width: int = 1):
            tokens, cache, history = carry
            lengths = context.lengths + i
            start = jnp.maximum(lengths - width, 0)
            window = jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, width))
            logits, cache = self.model.score(window(tokens, start), cache.with_lengths(start))
            last = jax.vmap(lambda row, at: row[at])(logits, lengths - 1 - start)
            q = probabilities(_fit(last, vocab)[:, None], sampling, history, nothing)[:, 0]
            keys = jax.vmap(lambda key: jax.random.fold_in(key, i))(context.keys)
            drawn = draw(keys, q, sampling.random)
            tokens = jax.vmap(lambda row, token, at: row.at[at].set(token))(tokens, drawn, lengths)
            return (tokens, cache, history.add(drawn)), (drawn, q)

        carry, first = step((context.tokens, state, history), jnp.int32(0), width=2)
        later = jnp.arange(1, self.lookahead, dtype=jnp.int32)
        (_, cache, _), rest = jax.lax.scan(step, carry, later)
        tokens, q = (
            jnp.concatenate([one[None], more]) for one, more in zip(first, rest, strict=True)
        )
        # A place without a distribution (NaN) ends the draft before it; the target goes on.
        usable = jnp.cumprod((q.sum(-1) > 0).astype(jnp.int32), axis=0).sum(0)
        draft = Draft(tokens=tokens.swapaxes(0, 1), probs=q.swapaxes(0, 1), lengths=usable)
        return draft, cache


def _fit(logits: Float[Array, "batch own"], vocab: int) -> Float[Array, "batch vocab"]:
    """The draft's logits over the target's ids: padding rows of either table cannot be drafted."""
    own = logits.shape[1]
    if own >= vocab:
        return logits[:, :vocab]
    return jnp.pad(logits, ((0, 0), (0, vocab - own)), constant_values=-jnp.inf)
