"""Token recycling: what the target would have said after the same last tokens."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from spec_jax.drafters.base import Committed, Context, Draft, Drafter, DrafterPrompt
from spec_jax.drafters.prompt_lookup import if_drafting
from spec_jax.pytree import pytree, static
from spec_jax.sampling.draw import argmax

NUM_ENTRIES = 2**14
"""Entries of a row's table, 128 KiB. A text of 4,000 tokens has up to 12,000."""
_SEED, _FACTOR = 2166136261, 2654435769
"""Of multiplicative hashing: the offset of FNV, and the factor of Knuth."""


@pytree
class NgramTable:
    """The token after each n-gram, by the n-gram's hash; of two in one place the later one stays.

    Attributes:
      hashes: of the n-grams.
      following: the tokens after them; -1 where there is no entry.
    """

    hashes: UInt32[Array, "*batch entries"]
    following: Int[Array, "*batch entries"]

    @classmethod
    def empty(cls, batch: int) -> "NgramTable":
        """Without entries."""
        shape = batch, NUM_ENTRIES
        return cls(jnp.zeros(shape, jnp.uint32), jnp.full(shape, -1, jnp.int32))


@pytree
class TokenRecycling(Drafter):
    """Drafts without a model, on device, from the target's likeliest tokens in earlier rounds.

    After Token Recycling (Luo et al. 2024, arXiv 2408.08696): each scored place, also behind a
    rejected token, says what the target finds likeliest. A table keeps it, and a draft is a
    chain of look-ups. The paper keeps eight candidates after one token, for a tree. Here one is
    kept, for a chain, and it depends on up to three tokens: the longest n-gram in the table counts.

    At first the table holds the n-grams of the prompt and of the namespace's past outputs.

    Attributes:
      lookahead: the largest number of tokens proposed (K).
      max_ngram: the longest n-gram in the table.
    """

    lookahead: int = static()
    max_ngram: int = static(default=3)
    needs_likeliest = True

    def init(self, prompt: DrafterPrompt) -> NgramTable:
        """The n-grams of the prompts, and of the outputs in `prompt.inputs`, each ended by -1."""
        tokens, (batch, length) = prompt.tokens, prompt.tokens.shape
        inside = jnp.arange(length, dtype=jnp.int32)[None] < prompt.lengths[:, None]
        text = jnp.where(inside, tokens, -1)
        if prompt.inputs is not None:
            text = jnp.concatenate([prompt.inputs, text], axis=1)
        following = jnp.pad(text[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
        return self._add(NgramTable.empty(batch), text, following)

    def propose(self, state: NgramTable, context: Context) -> tuple[Draft, NgramTable]:
        """A chain of look-ups, up to the first n-gram that is not in the table."""
        last = context.lengths[:, None] - jnp.arange(self.max_ngram, 0, -1, dtype=jnp.int32)[None]
        ends = jnp.take_along_axis(context.tokens, jnp.maximum(last, 0), axis=1)
        ends = jnp.where(last >= 0, ends, -1)
        chain = functools.partial(jax.vmap(self._chain), state, ends)
        tokens, lengths = if_drafting(context, self.lookahead, chain)
        return Draft(tokens=tokens, probs=None, lengths=lengths), state

    def commit(self, state: NgramTable, committed: Committed) -> NgramTable:
        """Adds the token that the target finds likeliest at each scored place."""
        assert committed.scored_tokens is not None and committed.likeliest is not None
        back = jnp.arange(1 - self.max_ngram, 0, dtype=jnp.int32)
        before = committed.before[:, None] - 1 + back[None]
        earlier = jnp.take_along_axis(committed.tokens, jnp.maximum(before, 0), axis=1)
        earlier = jnp.where(before >= 0, earlier, -1)
        text = jnp.concatenate([earlier, committed.scored_tokens], axis=1)
        unread = jnp.full_like(earlier, -1)
        return self._add(state, text, jnp.concatenate([unread, committed.likeliest], axis=1))

    def _chain(
        self, table: NgramTable, end: Int[Array, " ngram"]
    ) -> tuple[Int[Array, " lookahead"], Int[Array, ""]]:
        drafted = []
        for _ in range(self.lookahead):
            hashes, counts = self._ngrams(end)
            at = hashes[-1] % NUM_ENTRIES
            matches = counts[-1] & (table.hashes[at] == hashes[-1]) & (table.following[at] >= 0)
            longest = self.max_ngram - 1 - argmax(matches[::-1])
            drafted.append(jnp.where(matches.any(), table.following[at[longest]], -1))
            end = jnp.append(end[1:], drafted[-1])
        tokens = jnp.stack(drafted)
        num_tokens = jnp.cumprod((tokens >= 0).astype(jnp.int32)).sum(dtype=jnp.int32)
        return jnp.maximum(tokens, 0), num_tokens

    def _add(
        self,
        table: NgramTable,
        text: Int[Array, "batch length"],
        following: Int[Array, "batch length"],
    ) -> NgramTable:
        """Adds the n-grams that end at each token of a text, unless -1 is in them or follows."""

        def one(table: NgramTable, text: Array, following: Array) -> NgramTable:
            hashes, counts = self._ngrams(text)
            following = jnp.repeat(following, self.max_ngram)
            counts = counts.reshape(-1) & (following >= 0)
            hashes = hashes.reshape(-1)
            # Sorted, so that one entry is written to a place, and the same one on all devices.
            at = jnp.where(counts, hashes % NUM_ENTRIES, NUM_ENTRIES).astype(jnp.int32)
            order = jnp.argsort(at, stable=True)
            at, after = at[order], jnp.append(at[order][1:], NUM_ENTRIES)
            at = jnp.where(at != after, at, NUM_ENTRIES)
            return NgramTable(
                table.hashes.at[at].set(hashes[order], mode="drop"),
                table.following.at[at].set(following[order], mode="drop"),
            )

        return jax.vmap(one)(table, text, following)

    def _ngrams(
        self, text: Int[Array, " length"]
    ) -> tuple[UInt32[Array, "length ngram"], Bool[Array, "length ngram"]]:
        """The hashes of the n-grams that end at each token, from one token up, and which exist."""
        places = jnp.arange(text.shape[0], dtype=jnp.int32)
        hashed, exists = jnp.full(text.shape, _SEED, jnp.uint32), jnp.ones(text.shape, bool)
        hashes, existing = [], []
        for back in range(self.max_ngram):
            token = jnp.roll(text, back)
            hashed = (hashed ^ token.astype(jnp.uint32)) * jnp.uint32(_FACTOR)
            hashed = hashed ^ (hashed >> 15)
            exists = exists & (token >= 0) & (places >= back)
            hashes.append(hashed)
            existing.append(exists)
        return jnp.stack(hashes, axis=-1), jnp.stack(existing, axis=-1)
