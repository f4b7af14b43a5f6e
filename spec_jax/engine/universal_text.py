"""A drafter with any tokenizer: the host translates through text between rounds.

Hugging Face's universal assisted generation: the drafter reads the target's text in its own tokens
and drafts greedily; its draft is translated back to the target's tokens. The translated tokens
count as a deterministic draft, so that under sampling a token is accepted if the target would have
drawn it (string-level exact match: Timor et al. 2025, arXiv 2502.05202, algorithm 2).
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from spec_jax import distributed
from spec_jax.config import SamplingParams
from spec_jax.decoding.rows import broadcast_rows, insert_rows
from spec_jax.drafters.base import Context
from spec_jax.drafters.draft_model import catch_up, draft_on
from spec_jax.engine.batch_shape import BatchShape
from spec_jax.engine.programs import Compiler
from spec_jax.engine.requests import Request
from spec_jax.engine.rows import grown_rows
from spec_jax.errors import ConfigError
from spec_jax.models.cache import KVCache
from spec_jax.models.model import Model
from spec_jax.models.prefill import prefill
from spec_jax.sampling.parameters import BatchSampling
from spec_jax.text.translation import TextTranslator


class UniversalText:
    """The host's side of `HostDraft` for one batch: translations, and the drafter's cache.

    Args:
      model: the drafter.
      translator: between the target's tokens and the drafter's.
      lookahead: the largest number of tokens that a row drafts in a round.
      compiler: compiles the drafter's programs.
      shape: of the batch.
    """

    def __init__(
        self,
        model: Model,
        translator: TextTranslator,
        lookahead: int,
        compiler: Compiler,
        shape: BatchShape,
    ):
        self._model, self._lookahead = model, lookahead
        self._translator, self._compiler = translator, compiler
        self._cache: KVCache | None = None
        self._cache_key: tuple[int, ...] = ()
        self._resize(shape)

    def _resize(self, shape: BatchShape) -> None:
        self._rows = [self._translator.row() for _ in range(shape.batch)]
        self._num_read = np.zeros((shape.batch,), np.int64)
        # Another tokenizer may need more tokens for the same text; nothing more is drafted for a
        # row that no longer fits.
        self._tokens = np.zeros((shape.batch, 2 * shape.capacity), np.int32)
        self._lengths = np.ones((shape.batch,), np.int32)
        sampling = BatchSampling.stack(
            [SamplingParams()] * shape.batch,
            self._model.config.vocab_size,
            placement=self._model.placement,
        )
        self._sampling = self._compiler.put(sampling)
        self._key, self._block = self._tokens.shape, shape.block

    def grow(self, shape: BatchShape, moved: Mapping[int, int]) -> None:
        """Makes room for a larger batch, in which slots have the new numbers `moved`."""
        rows, num_read = self._rows, self._num_read
        tokens, lengths = self._tokens, self._lengths
        self._resize(shape)
        for old, new in moved.items():
            self._rows[new], self._num_read[new] = rows[old], num_read[old]
            self._tokens[new, : tokens.shape[1]] = tokens[old]
            full = lengths[old] == tokens.shape[1]  # a full row stays full
            self._lengths[new] = self._tokens.shape[1] if full else lengths[old]

    def insert(
        self,
        group: Sequence[int | None],
        requests: Sequence[Request],
        slots: Int[np.ndarray, "shards joining"],
    ) -> None:
        """Reads the prompts of requests in the drafter's tokens.

        Args:
          group: the slot that each request takes, or None if it is padding.
          requests: whose prompts they are.
          slots: `group` as `insert_rows` takes it.
        """
        tokens = np.zeros((len(group), self._tokens.shape[1]), np.int32)
        lengths = np.ones((len(group),), np.int32)
        for row, (slot, request) in enumerate(zip(group, requests, strict=True)):
            if slot is not None:
                self._rows[slot] = self._translator.row()
                self._num_read[slot], self._lengths[slot] = 0, 1
                self._learn(slot, request.prompt_token_ids)
                tokens[row], lengths[row] = self._tokens[slot], self._lengths[slot]
        args = (self._model, *self._compiler.put((tokens, lengths)))
        key = ("the reading of prompts by the drafter", (tokens.shape, self._block))
        rows = self._compiler.program(key, _begin, args, (self._block,))(*args)
        self._make_room(rows, *slots.shape)
        insert = self._compiler.program(
            ("the insertion of the drafter's rows", (self._key, len(group))),
            insert_rows,
            (self._cache, slots, rows),
            donate=(0,),
            like=self._cache,
        )
        self._cache = insert(self._cache, slots, rows)

    def _make_room(self, rows: KVCache, shards: int, entering: int) -> None:
        """Gives the cache the batch's shape; `rows` have as much room for a row."""
        key, batch = (self._key, entering), len(self._rows)
        if self._cache is None:
            fill = self._compiler.program(
                ("an empty cache of the drafter", key),
                broadcast_rows,
                (rows,),
                (shards, batch),
                like=rows,
            )
            self._cache = fill(rows)
        elif self._cache_key != self._key:
            grow = self._compiler.program(
                ("a larger cache of the drafter", (self._cache_key, key)),
                _grow,
                (self._cache, rows),
                (shards, batch),
                like=rows,
            )
            self._cache = grow(self._cache, rows)
        self._cache_key = self._key

    def propose(
        self,
        tokens: Int[np.ndarray, "batch length"],
        lengths: Int[np.ndarray, " batch"],
        limits: Int[np.ndarray, " batch"],
        threshold: Float[np.ndarray, " batch"] | None,
    ) -> tuple[Int[np.ndarray, "batch lookahead"], Int[np.ndarray, " batch"]]:
        """Each row's next draft in the target's tokens, and its length.

        Args:
          tokens: the rows' texts.
          lengths: the length of each.
          limits: how many tokens each row may draft now.
          threshold: confidence below which a row stops drafting.
        """
        valid = np.zeros_like(self._lengths)
        for row in range(len(self._rows)):
            new = tokens[row, self._num_read[row] : lengths[row]]
            valid[row] = self._learn(row, new.tolist()) if len(new) else self._lengths[row]
        room = self._tokens.shape[1] - self._lengths - self._lookahead - 2
        limits = np.where(room > 0, limits, 0).astype(np.int32)
        arguments = self._compiler.put((self._tokens, self._lengths, valid, limits, threshold))
        draft = self._compiler.program(
            ("drafting in another tokenizer", self._key),
            _draft,
            (self._model, self._cache, *arguments, self._sampling),
            (self._lookahead,),
            donate=(1,),
        )
        drafted, counts, self._cache = draft(self._model, self._cache, *arguments, self._sampling)
        drafted, counts = distributed.to_host((drafted, counts))
        proposed = np.zeros((len(limits), self._lookahead), np.int32)
        proposed_lengths = np.zeros_like(limits)
        for row, translation in enumerate(self._rows):
            if not counts[row]:
                continue
            draft_ids, end = drafted[row, : counts[row]], self._lengths[row]
            self._tokens[row, end : end + len(draft_ids)] = draft_ids  # some may be accepted
            ids = translation.propose(draft_ids.tolist())[: self._lookahead]
            proposed[row, : len(ids)] = ids
            proposed_lengths[row] = len(ids)
        return proposed, proposed_lengths

    def _learn(self, row: int, target_ids: Sequence[int]) -> int:
        """Adds to a row's text; returns how many of the drafter's first tokens are unchanged."""
        revision = self._rows[row].extend(target_ids)
        self._num_read[row] += len(target_ids)
        end = revision.num_kept + len(revision.ids)
        size = self._tokens.shape[1]
        if max(end, self._lengths[row]) >= size:
            self._lengths[row] = size  # full from now on
            return 0
        self._tokens[row, revision.num_kept : end] = revision.ids
        self._lengths[row] = max(end, 1)
        return revision.num_kept


def _begin(
    model: Model, tokens: Int[Array, "batch length"], lengths: Int[Array, " batch"], block: int
) -> KVCache:
    # Without headroom, so no rings: a text that is read again may differ from any position on.
    cache = model.new_cache(*tokens.shape)
    if not cache.can_truncate:
        raise ConfigError(
            "universal_text reads a drafter's text again from any token on, but the draft model "
            "has layers whose state cannot be rolled back that far. Use universal_vocabulary."
        )
    return prefill(model, tokens, lengths - 1, cache, block)


def _grow(cache: KVCache, rows: KVCache, shards: int, batch: int) -> KVCache:
    return grown_rows(cache, broadcast_rows(rows, shards, batch), shards)


def _draft(
    model: Model,
    cache: KVCache,
    tokens: Int[Array, "batch length"],
    lengths: Int[Array, " batch"],
    valid: Int[Array, " batch"],
    limits: Int[Array, " batch"],
    threshold: Float[Array, " batch"] | None,
    sampling: BatchSampling,
    lookahead: int,
) -> tuple[Int[Array, "batch lookahead"], Int[Array, " batch"], KVCache]:
    """Greedy drafts in the drafter's tokens, their lengths, and the cache."""
    going = limits > 0
    num_computed = jnp.clip(jnp.minimum(cache.lengths, valid), 0, jnp.maximum(lengths - 1, 0))
    cache = catch_up(
        model, tokens, jnp.where(going, lengths - 2, 0), cache.with_lengths(num_computed)
    )
    keys = jax.random.split(jax.random.key(0), tokens.shape[0])  # greedy drafts draw nothing
    context = Context(tokens, lengths, lengths, keys, sampling, limits=limits, threshold=threshold)
    draft, cache = draft_on(model, tokens, lengths, cache, context, lookahead=lookahead)
    return draft.tokens, draft.lengths, cache
