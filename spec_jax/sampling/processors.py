"""Logits processors, which run before temperature and truncation, at every query position.

The order is the order of Hugging Face transformers' `_get_logits_processor`: bias, repetition
penalty, bad words, min tokens, allowed tokens; presence and frequency penalties follow the OpenAI
API, after the repetition penalty. A position sees the tokens before it, drafted ones included.
Tokens are counted and banned by comparing ids, never by scatters or gathers along the vocabulary,
so the vocabulary can stay sharded. Steps that need the history are left out of the program if no
row of the batch needs them; a step does not change the logits of a row that does not use it.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32, UInt32

from spec_jax.control import in_place_if
from spec_jax.pytree import pytree
from spec_jax.sampling.draw import argmax
from spec_jax.sampling.parameters import BatchSampling

MAX_INITIAL_TIMESTAMP = 50
"""The latest begin of a text, in steps of 0.02 seconds."""
TokenSets = UInt32[Array, "batch positions words"] | Int32[Array, "batch positions words"]
"""Packed sets of tokens: token i is bit i % 32 of word i // 32; no set has ids past its words."""


@pytree
class History:
    """What the processors need of the tokens before the first query position.

    Attributes:
      prompt: how often each token occurs in the prompt; no columns if `features.history` is off.
      generated: how often each token was generated; no columns if `features.history` is off.
      lengths: the number of generated tokens of each row.
      recent: the last tokens of each row, one fewer than the longest bad word can have; -1 before
        the row's first token.
    """

    prompt: Int[Array, "batch vocab"]
    generated: Int[Array, "batch vocab"]
    lengths: Int[Array, " batch"]
    recent: Int[Array, "batch recent"]

    @classmethod
    def of(
        cls,
        tokens: Int[Array, "batch length"],
        lengths: Int[Array, " batch"],
        prompt_lengths: Int[Array, " batch"],
        sampling: BatchSampling,
    ) -> "History":
        """The history of rows of `lengths` tokens, the first `prompt_lengths` of them prompt."""
        batch, vocab = sampling.logit_bias.shape
        if sampling.features.history:
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
            in_prompt = positions < prompt_lengths[:, None]
            in_output = ~in_prompt & (positions < lengths[:, None])
            rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
            zeros = jnp.zeros((batch, vocab), jnp.int32)
            prompt = zeros.at[rows, tokens].add(in_prompt.astype(jnp.int32))
            generated = zeros.at[rows, tokens].add(in_output.astype(jnp.int32))
        else:
            prompt, generated = jnp.zeros((2, batch, 0), jnp.int32)
        distances = jnp.arange(sampling.bad_words.shape[2] - 1, 0, -1, dtype=jnp.int32)
        positions = lengths[:, None] - distances[None]
        last = jnp.take_along_axis(tokens, jnp.maximum(positions, 0), axis=1)
        return cls(
            prompt=prompt,
            generated=generated,
            lengths=lengths - prompt_lengths,
            recent=jnp.where(positions >= 0, last, -1),
        )

    def repeat(self, times: int) -> "History":
        """Each row's history `times` times in succession."""
        return jax.tree.map(lambda each: jnp.repeat(each, times, axis=0), self)

    def add(self, tokens: Int[Array, " batch"]) -> "History":
        """The history after one more generated token in each row."""
        ids = jnp.arange(self.generated.shape[1], dtype=jnp.int32)
        return dataclasses.replace(
            self,
            generated=self.generated + (ids[None] == tokens[:, None]).astype(jnp.int32),
            lengths=self.lengths + 1,
            recent=jnp.concatenate([self.recent[:, 1:], tokens[:, None]], axis=1),
        )


def process(
    logits: Float[Array, "batch positions vocab"],
    sampling: BatchSampling,
    history: History,
    following: Int[Array, "batch drafted"],
    ancestors: Bool[Array | np.ndarray, "positions drafted"] | None = None,
    allowed: TokenSets | None = None,
) -> Float[Array, "batch positions vocab"]:
    """The logits after everything except temperature and truncation.

    For the arguments see `probabilities`. A NaN stays a NaN.
    """
    logits = _biased(logits, sampling)
    if sampling.features.history:
        positions, vocab = logits.shape[1:]
        if ancestors is None:  # all tokens before a position
            ancestors = jnp.tri(positions, positions - 1, -1, dtype=bool)
        before = _TokensBefore(history, following, jnp.asarray(ancestors))
        logits = _penalise(logits, sampling, before)
        forbidden = _forbidden(sampling, before, vocab)
        logits = jnp.where(forbidden, logits - jnp.inf, logits)
        if sampling.features.timestamps:
            forbidden = _forbidden_by_timestamps(logits, sampling, before)
            logits = jnp.where(forbidden, logits - jnp.inf, logits)
    if allowed is None:
        return logits
    return jnp.where(_unpack(allowed, logits.shape[2]), logits, logits - jnp.inf)


def _biased(
    logits: Float[Array, "batch positions vocab"], sampling: BatchSampling
) -> Float[Array, "batch positions vocab"]:
    """The logits with `logit_bias`, which most batches do without."""
    if not sampling.skips_unused:
        return logits + sampling.logit_bias[:, None]
    shape = logits.shape

    def add(flat: Float[Array, "rows vocab"]) -> Float[Array, "rows vocab"]:
        return (flat.reshape(shape) + sampling.logit_bias[:, None]).reshape(flat.shape)

    # Flat like the results of products, so that the loop copies nothing.
    return in_place_if(sampling.is_biased.any(), add, logits.reshape(-1, shape[-1])).reshape(shape)


class _TokensBefore(NamedTuple):
    """The tokens before each query position; for the attributes see `probabilities`."""

    history: History
    following: Int[Array, "batch drafted"]
    ancestors: Bool[Array, "positions drafted"]

    def num_generated(self) -> Int[Array, "batch positions"]:
        """The number of generated tokens before each position."""
        return self.history.lengths[:, None] + self.ancestors.sum(1, dtype=jnp.int32)[None]

    def drafted(self, vocab: int) -> Bool[Array, "batch positions drafted {vocab}"]:
        """Whether each draft token stands before a position, and is each token."""
        ids = jnp.arange(vocab, dtype=jnp.int32)
        is_token = self.following[:, None, :, None] == ids[None, None, None]
        return is_token & self.ancestors[None, :, :, None]

    def recent(self) -> Int[Array, "batch positions recent"]:
        """The last tokens before each position, along its path through the draft."""
        width = self.history.recent.shape[1]
        tokens = jnp.concatenate([self.history.recent, self.following], axis=1)
        visible = jnp.pad(self.ancestors, ((0, 0), (width, 0)), constant_values=True)
        # The distance of each visible token from the position.
        back = jnp.cumsum(visible[:, ::-1], axis=1, dtype=jnp.int32)[:, ::-1]
        distances = jnp.arange(width, 0, -1, dtype=jnp.int32)
        is_recent = visible[:, None] & (back[:, None] == distances[None, :, None])
        return tokens[:, argmax(is_recent)]


def _penalise(
    logits: Float[Array, "batch positions vocab"], sampling: BatchSampling, before: _TokensBefore
) -> Float[Array, "batch positions vocab"]:
    history = before.history
    drafted = before.drafted(logits.shape[2]).sum(2, dtype=jnp.int32)
    generated = history.generated[:, None] + drafted
    seen = (history.prompt[:, None] + generated) > 0

    repetition = sampling.repetition_penalty[:, None, None]
    penalised = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen & (repetition != 1), penalised, logits)
    presence = sampling.presence_penalty[:, None, None]
    frequency = sampling.frequency_penalty[:, None, None]
    logits = logits - presence * (generated > 0).astype(logits.dtype)
    return logits - frequency * generated.astype(logits.dtype)


def _forbidden(
    sampling: BatchSampling, before: _TokensBefore, vocab: int
) -> Bool[Array, "batch positions {vocab}"]:
    """The tokens that min_tokens and bad words forbid at each position."""
    is_early = before.num_generated() < sampling.min_tokens[:, None]
    stops = jnp.where(is_early[:, :, None], sampling.stop_token_ids[:, None], -1)
    recent = before.recent()
    begin, last = sampling.bad_words[:, None, :, :-1], sampling.bad_words[:, None, :, -1]
    has_begin = ((begin < 0) | (begin == recent[:, :, None])).all(-1)
    words = jnp.where(has_begin, last, -1)
    ids = jnp.arange(vocab, dtype=jnp.int32)

    def forbid(word: Array, forbidden: Array) -> Array:
        return forbidden | (words[:, :, word, None] == ids[None, None])

    forbidden = (stops[:, :, :, None] == ids[None, None, None]).any(2)
    num_words = words.shape[2]
    if sampling.skips_unused:
        num_words = (last >= 0).sum(-1, dtype=jnp.int32).max()
    return jax.lax.fori_loop(0, num_words, forbid, forbidden)


def _forbidden_by_timestamps(
    logits: Float[Array, "batch positions vocab"], sampling: BatchSampling, before: _TokensBefore
) -> Bool[Array, "batch positions vocab"]:
    """The tokens that Whisper's rules of timestamps forbid (OpenAI's `ApplyTimestampRules`).

    A text begins with a timestamp of at most one second. Timestamps come in pairs, except the last
    one before the end, and never go back. If all timestamps together are likelier than the
    likeliest other token, the next token must be a timestamp.
    """
    ids = jnp.arange(logits.shape[2], dtype=jnp.int32)[None, None]
    first = sampling.timestamps[:, None]
    recent, num_generated = before.recent(), before.num_generated()
    ends_timed = (num_generated >= 1) & (recent[:, :, -1] >= first)
    ends_with_pair = ends_timed & ((num_generated < 2) | (recent[:, :, -2] >= first))
    needs_partner = ends_timed & ~ends_with_pair
    generated = (before.history.generated[:, None] > 0) | before.drafted(ids.size).any(2)
    is_time = ids >= first[:, :, None]
    latest = jnp.where(generated & is_time, ids, -1).max(-1)
    # Both timestamps of a pair may be equal; a new one, or a single one, is later than all before.
    earliest = jnp.where(needs_partner, latest, latest + 1)
    is_stop = (sampling.stop_token_ids[:, None, :, None] == ids[:, :, None]).any(2)
    # The token before the first timestamp asks for an output without timestamps.
    forbidden = (ids == first[:, :, None] - 1) | (ends_with_pair[..., None] & is_time)
    forbidden = forbidden | (needs_partner[..., None] & ~is_time & ~is_stop)
    forbidden = forbidden | (is_time & (ids < earliest[..., None]))
    not_initial = ~is_time | (ids > first[:, :, None] + MAX_INITIAL_TIMESTAMP)
    forbidden = forbidden | ((num_generated == 0)[..., None] & not_initial)
    masked = jnp.where(forbidden, -jnp.inf, logits)
    times, others = (jnp.where(each, masked, -jnp.inf) for each in (is_time, ~is_time))
    must_be_time = jax.nn.logsumexp(times, axis=-1) > others.max(-1)
    forbidden = forbidden | (must_be_time[..., None] & ~is_time)
    return forbidden & (sampling.timestamps >= 0)[:, None, None]


def _unpack(allowed: TokenSets, vocab: int) -> Bool[Array, "batch positions {vocab}"]:
    shifts = jnp.arange(32, dtype=allowed.dtype)[None, None, None]
    bits = ((allowed[..., None] >> shifts) & 1) != 0
    flat = bits.reshape(*allowed.shape[:2], -1)[..., :vocab]
    return jnp.pad(flat, ((0, 0), (0, 0), (0, vocab - flat.shape[2])))
