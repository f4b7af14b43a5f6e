"""An independent draft model (Chen et al. 2023, arXiv 2302.01318, section 3)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.drafters.autoregressive import autoregress
from spec_jax.drafters.base import Committed, Context, Draft, Drafter, Prompt
from spec_jax.models.attention import Pattern
from spec_jax.models.cache import KVCache
from spec_jax.models.model import Model
from spec_jax.models.prefill import prefill
from spec_jax.sharding.pytree import pytree, static

CATCH_UP = 16
"""Tokens that a draft model reads at a time if it has not drafted for some rounds."""


@pytree
class DraftModel(Drafter):
    """Drafts with a second, smaller model that has its own cache.

    Attributes:
      model: the draft model.
      lookahead: tokens proposed per round (K).
      drafts: independent drafts of each row.
      columns: the model's output for each of the target's ids, or -1 if it has none; by default
        both models share their ids.
      shares_encoder: whether the draft is a decoder for the output of the target's encoder, as
        Distil-Whisper (arXiv 2311.00430) is; static.
    """

    model: Model
    lookahead: int = static()
    drafts: int = static(default=1)
    columns: Int[Array, " vocab"] | None = None
    shares_encoder: bool = static(default=False)
    steady = True

    def init(self, prompt: Prompt) -> KVCache:
        """The draft's cache of the prompts."""
        headroom = headroom_of_drafts(prompt.block, self.lookahead * self.drafts)
        tokens = self._readable(prompt.tokens)
        return draft_cache(
            self.model, tokens, prompt.lengths, prompt, headroom, self.shares_encoder
        )

    def _readable(self, tokens: Int[Array, "batch length"]) -> Int[Array, "batch length"]:
        """The tokens; ids that exist only in the target's padded embedding are replaced.

        The draft's embedding has no row for such an id: it would read NaN and stop drafting.
        """
        return jnp.minimum(tokens, self.model.config.vocab_size - 1)

    def commit(self, state: KVCache, committed: Committed) -> KVCache:
        """Keeps all but the last two tokens, which the next round's first step reads again."""
        if self.drafts > 1:
            steps = jnp.arange(self.lookahead - 1, dtype=jnp.int32)[None]
            sources = committed.before[:, None] + steps * self.drafts + committed.chosen[:, None]
            state = state.gather(sources, committed.before)
        return state.with_lengths(jnp.clip(committed.lengths - 2, 0, state.lengths))

    def propose(self, state: KVCache, context: Context) -> tuple[Draft, KVCache]:
        """K tokens, each drawn from the draft's own processed distribution."""
        tokens = self._readable(context.tokens)
        if context.limits is not None:
            wanted = jnp.where(context.limits > 0, context.lengths - 2, 0)
            state = catch_up(self.model, tokens, wanted, state)
        return draft_on(
            self.model,
            tokens,
            context.lengths,
            state,
            context,
            lookahead=self.lookahead,
            drafts=self.drafts,
            columns=self.columns,
        )


def draft_cache(
    model: Model,
    tokens: Int[Array, "batch length"],
    lengths: Int[Array, " batch"],
    prompt: Prompt,
    headroom: int,
    shares_encoder: bool = False,
) -> KVCache:
    """A draft model's cache of all but the last two tokens of its prompts.

    Args:
      model: the draft model; with an encoder, it reads the prompt's source.
      tokens: the prompts in its tokens.
      lengths: tokens of each.
      prompt: as the drafter has it.
      headroom: see `headroom_of_drafts`.
      shares_encoder: see `DraftModel`.
    """
    cache = model.new_cache(*tokens.shape, headroom=headroom)
    if model.config.encoder is not None:
        assert prompt.source is not None
        encoded = model.encode(prompt.source, shared=shares_encoder)[0]
        cache = dataclasses.replace(cache, encoded=encoded)
    cache = prefill(lambda *args: model.extend(*args).cache, tokens, lengths, cache, prompt.block)
    return cache.with_lengths(jnp.maximum(lengths - 2, 0))


def headroom_of_drafts(block: int, drafted: int) -> int:
    """Most KV slots that a draft model's calls write past its next query; see `KVCache`.

    Besides a block of a prompt these are the drafted tokens, the two read again before them, and
    what `catch_up` reads.
    """
    return max(block, drafted + 2 + CATCH_UP)


def draft_on(
    model: Model,
    tokens: Int[Array, "batch length"],
    lengths: Int[Array, " batch"],
    cache: KVCache,
    context: Context,
    *,
    lookahead: int,
    drafts: int = 1,
    columns: Int[Array, " vocab"] | None = None,
    own_ids: Int[Array, " vocab"] | None = None,
) -> tuple[Draft, KVCache]:
    """Continues texts whose cache holds all but the last two tokens.

    The first step reads those two. After a full acceptance the first of them is the last draft
    token, which the draft has not read yet, so the cache catches up without an additional call.
    Otherwise it is read twice, which costs little because weight bandwidth bounds a step.

    Args:
      model: the draft model.
      tokens: the rows' texts in its tokens.
      lengths: known tokens of each row.
      cache: its cache of them; rows that do not draft in this round may lack more tokens.
      context: the rows.
      lookahead: most tokens to draft; static.
      drafts: drafts of each row; static.
      columns: the model's output for each of the target's ids; as in `DraftModel`.
      own_ids: the model's input id for each of the target's ids; by default they are the same.
    """
    vocab, before = context.sampling.logit_bias.shape[1], cache.lengths
    if context.limits is not None:
        # Rows that do not draft are read too; they must not write far past their text.
        lengths = jnp.where(context.limits > 0, lengths, before + 2)

    def step(cache: KVCache, i: int | Array, last: Array) -> tuple[Array, KVCache]:
        if isinstance(i, int):
            logits, cache = read_last_two(model, tokens, lengths, cache)
            logits = over_vocabulary(logits, vocab, columns)
            return jnp.repeat(logits[:, None], drafts, axis=1), cache
        last = last if own_ids is None else own_ids[last]
        cache = cache.with_lengths(lengths + (i - 1) * drafts)
        pattern = None if drafts == 1 else _latest_of_drafts(lengths, i, lookahead, drafts)
        logits, _, cache = model.score(last, cache, pattern)
        return over_vocabulary(logits, vocab, columns), cache

    draft, cache = autoregress(
        step, cache, context, lookahead=lookahead, drafts=drafts, placement=model.placement
    )
    read = lengths + jnp.maximum(draft.lengths - 1, 0)
    if context.limits is not None:
        read = jnp.where(context.limits > 0, read, before)
    return draft, cache.with_lengths(read)


def _latest_of_drafts(
    lengths: Int[Array, " batch"], step: int | Array, lookahead: int, drafts: int
) -> Pattern:
    """The drafts' latest tokens: each sees the text and the tokens of its own draft."""
    drafted = jnp.arange(lookahead * drafts, dtype=jnp.int32)
    draft = jnp.arange(drafts, dtype=jnp.int32)
    own = (drafted < step * drafts)[None] & (drafted[None] % drafts == draft[:, None])
    return Pattern(
        positions=jnp.broadcast_to((lengths + step - 1)[:, None], (len(lengths), drafts)),
        start=lengths + (step - 1) * drafts,
        text=lengths,
        among=own,
        depths=drafted // drafts,
    )


def read_last_two(
    model: Model, tokens: Int[Array, "batch length"], lengths: Int[Array, " batch"], cache: KVCache
) -> tuple[Float[Array, "batch own"], KVCache]:
    """Logits after each row's last known token, and the cache with the last two tokens."""
    start = jnp.maximum(lengths - 2, 0)
    logits, _, cache = model.score(_slices(tokens, start, 2), cache.with_lengths(start))
    at = (lengths - 1 - start)[:, None, None]
    return jnp.take_along_axis(logits, at, axis=1)[:, 0], cache


def catch_up(
    model: Model,
    tokens: Int[Array, "batch length"],
    wanted: Int[Array, " batch"],
    cache: KVCache,
) -> KVCache:
    """Reads known tokens until each row's cache holds at least `wanted` of them."""
    size = min(CATCH_UP, tokens.shape[1])

    def read(cache: KVCache) -> KVCache:
        # A window that would pass the end reads some tokens twice instead.
        start = jnp.minimum(cache.lengths, tokens.shape[1] - size)
        behind = cache.lengths < wanted
        after = model.extend(_slices(tokens, start, size), cache.with_lengths(start)).cache
        return after.with_lengths(
            jnp.where(behind, jnp.minimum(start + size, wanted), cache.lengths)
        )

    return jax.lax.while_loop(lambda cache: (cache.lengths < wanted).any(), read, cache)


def _slices(rows: Array, start: Int[Array, " batch"], size: int) -> Array:
    """`size` (static) tokens of each row from its own start on."""
    return jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, size))(rows, start)


def over_vocabulary(
    logits: Float[Array, "*lead own"], vocab: int, columns: Int[Array, " vocab"] | None
) -> Float[Array, "*lead vocab"]:
    """The draft's logits over the target's ids; -inf for ids that the draft cannot propose.

    Without `columns` both models share their ids; padding rows of an embedding have no meaning.
    """
    own = logits.shape[-1]
    if columns is not None:
        shared = (columns >= 0).reshape((1,) * (logits.ndim - 1) + (-1,))
        return jnp.where(shared, jnp.take(logits, jnp.maximum(columns, 0), axis=-1), -jnp.inf)
    if own >= vocab:
        return logits[..., :vocab]
    missing = [(0, 0)] * (logits.ndim - 1) + [(0, vocab - own)]
    return jnp.pad(logits, missing, constant_values=-jnp.inf)
