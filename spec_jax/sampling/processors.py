"""Logits processors, which run before temperature and truncation, at every query position.

The order is that of Hugging Face transformers' `_get_logits_processor`: bias, repetition penalty,
bad words, min tokens, allowed tokens; presence and frequency penalties follow the OpenAI API,
after the repetition penalty. A position sees the tokens before it, drafted ones included. Tokens
are counted and banned by comparing ids, never by scatters or gathers along the vocabulary, so the
vocabulary can stay sharded. Steps that need the history are left out of the program if no row of
the batch needs them; the logits of a row that does not use a step do not change, bit for bit.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32, UInt32

from spec_jax.pytree import pytree
from spec_jax.sampling.draw import argmax
from spec_jax.sampling.parameters import BatchSampling

MOST_INITIAL_TIMESTAMP = 50
"""Steps of 0.02 seconds: the latest begin of a text."""


@pytree
class History:
    """What the processors need to know about the tokens before a query position.

    Attributes:
      prompt: how often each token occurs in the prompt; no columns if `features.history` is off.
      generated: how often it was generated; likewise.
      lengths: generated tokens of each row.
      recent: the last tokens of each row, as many as a bad word can have before its own last;
        -1 before the row's first.
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
        back = jnp.arange(sampling.bad_words.shape[2] - 1, 0, -1, dtype=jnp.int32)
        at = lengths[:, None] - back[None]
        last = jnp.take_along_axis(tokens, jnp.maximum(at, 0), axis=1)
        return cls(
            prompt=prompt,
            generated=generated,
            lengths=lengths - prompt_lengths,
            recent=jnp.where(at >= 0, last, -1),
        )

    def repeat(self, times: int) -> "History":
        """Each row's history `times` times in succession."""
        return jax.tree.map(lambda each: jnp.repeat(each, times, axis=0), self)

    def add(self, tokens: Int[Array, " batch"]) -> "History":
        """One more generated token in each row."""
        ids = jnp.arange(self.generated.shape[1], dtype=jnp.int32)
        drawn = (ids[None] == tokens[:, None]).astype(jnp.int32)
        return dataclasses.replace(
            self,
            generated=self.generated + drawn,
            lengths=self.lengths + 1,
            recent=jnp.concatenate([self.recent[:, 1:], tokens[:, None]], axis=1),
        )


def process(
    logits: Float[Array, "batch positions vocab"],
    sampling: BatchSampling,
    history: History,
    following: Int[Array, "batch drafted"],
    ancestors: Bool[Array | np.ndarray, "positions drafted"] | None = None,
    allowed: UInt32[Array, "batch positions words"]
    | Int32[Array, "batch positions words"]
    | None = None,
) -> Float[Array, "batch positions vocab"]:
    """The logits after everything except temperature and truncation.

    Arguments as for `sampling.probabilities`. A NaN stays a NaN.
    """
    logits = logits + sampling.logit_bias[:, None]
    if sampling.features.history:
        before = _chain(logits.shape[1]) if ancestors is None else jnp.asarray(ancestors)
        logits = _penalise(logits, sampling, history, following, before)
        forbidden = _forbidden(sampling, history, following, before, logits.shape[2])
        logits = jnp.where(forbidden, logits - jnp.inf, logits)
        if sampling.features.timestamps:
            forbidden = _mistimed(logits, sampling, history, following, before)
            logits = jnp.where(forbidden, logits - jnp.inf, logits)
    if allowed is None:
        return logits
    return jnp.where(_unpack(allowed, logits.shape[2]), logits, logits - jnp.inf)


def _chain(positions: int) -> Bool[Array, "positions drafted"]:
    """The ancestors in a draft without branches: all tokens before a position."""
    return jnp.tri(positions, positions - 1, -1, dtype=bool)


def _penalise(
    logits: Float[Array, "batch positions vocab"],
    sampling: BatchSampling,
    history: History,
    following: Int[Array, "batch drafted"],
    before: Bool[Array, "positions drafted"],
) -> Float[Array, "batch positions vocab"]:
    ids = jnp.arange(logits.shape[2], dtype=jnp.int32)
    drafted = following[:, None, :, None] == ids[None, None, None]
    drafted = (drafted & before[None, :, :, None]).sum(2, dtype=jnp.int32)
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
    sampling: BatchSampling,
    history: History,
    following: Int[Array, "batch drafted"],
    before: Bool[Array, "positions drafted"],
    vocab_size: int,
) -> Bool[Array, "batch positions {vocab_size}"]:
    """The tokens that min_tokens and bad words forbid at each position."""
    generated = history.lengths[:, None] + before.sum(1, dtype=jnp.int32)[None]
    early = generated < sampling.min_tokens[:, None]
    stops = jnp.where(early[:, :, None], sampling.stop_token_ids[:, None], -1)
    recent = _recent(history.recent, following, before)
    begin, last = sampling.bad_words[:, None, :, :-1], sampling.bad_words[:, None, :, -1]
    begun = ((begin < 0) | (begin == recent[:, :, None])).all(-1)
    words = jnp.where(begun, last, -1)
    ids = jnp.arange(vocab_size, dtype=jnp.int32)

    def forbid(word: Array, forbidden: Array) -> Array:
        return forbidden | (words[:, :, word, None] == ids[None, None])

    forbidden = (stops[:, :, :, None] == ids[None, None, None]).any(2)
    room = words.shape[2]
    count = (last >= 0).sum(-1, dtype=jnp.int32).max() if sampling.skips_unused else room
    return jax.lax.fori_loop(0, count, forbid, forbidden)


def _mistimed(
    logits: Float[Array, "batch positions vocab"],
    sampling: BatchSampling,
    history: History,
    following: Int[Array, "batch drafted"],
    before: Bool[Array, "positions drafted"],
) -> Bool[Array, "batch positions vocab"]:
    """The tokens that Whisper's rules of timestamps forbid (OpenAI's `ApplyTimestampRules`).

    A text begins with a timestamp of at most one second. Timestamps come in pairs, but for the last
    one before the end, and never go back. If all timestamps together are likelier than the
    likeliest other token, one of them is due.
    """
    ids = jnp.arange(logits.shape[2], dtype=jnp.int32)[None, None]
    first = sampling.timestamps[:, None]
    recent = _recent(history.recent, following, before)
    count = history.lengths[:, None] + before.sum(1, dtype=jnp.int32)[None]
    timed = (count >= 1) & (recent[:, :, -1] >= first)
    paired = timed & ((count < 2) | (recent[:, :, -2] >= first))
    drafted = (following[:, None, :, None] == ids[:, :, None]) & before[None, :, :, None]
    said = (history.generated[:, None] > 0) | drafted.any(2)
    is_time = ids >= first[:, :, None]
    latest = jnp.where(said & is_time, ids, -1).max(-1)
    # A pair may be of one moment; a new one, or a single timestamp, is later than all before.
    least = jnp.where(timed & ~paired, latest, latest + 1)
    is_stop = (sampling.stop_token_ids[:, None, :, None] == ids[:, :, None]).any(2)
    # The token before the first timestamp asks for none.
    forbidden = (ids == first[:, :, None] - 1) | (paired[..., None] & is_time)
    forbidden = forbidden | ((timed & ~paired)[..., None] & ~is_time & ~is_stop)
    forbidden = forbidden | (is_time & (ids < least[..., None]))
    initial = ~is_time | (ids > first[:, :, None] + MOST_INITIAL_TIMESTAMP)
    forbidden = forbidden | ((count == 0)[..., None] & initial)
    masked = jnp.where(forbidden, -jnp.inf, logits)
    times, others = (jnp.where(each, masked, -jnp.inf) for each in (is_time, ~is_time))
    due = jax.nn.logsumexp(times, axis=-1) > others.max(-1)
    forbidden = forbidden | (due[..., None] & ~is_time)
    return forbidden & (sampling.timestamps >= 0)[:, None, None]


def _recent(
    recent: Int[Array, "batch recent"],
    following: Int[Array, "batch drafted"],
    before: Bool[Array, "positions drafted"],
) -> Int[Array, "batch positions recent"]:
    """The last tokens before each position, along its own path through the draft."""
    width = recent.shape[1]
    known = jnp.concatenate([recent, following], axis=1)
    visible = jnp.pad(before, ((0, 0), (width, 0)), constant_values=True)
    # The distance of each visible token from the position.
    back = jnp.cumsum(visible[:, ::-1], axis=1, dtype=jnp.int32)[:, ::-1]
    wanted = jnp.arange(width, 0, -1, dtype=jnp.int32)
    found = visible[:, None] & (back[:, None] == wanted[None, :, None])
    return known[:, argmax(found)]


def _unpack(
    allowed: UInt32[Array, "batch positions words"] | Int32[Array, "batch positions words"],
    vocab: int,
) -> Bool[Array, "batch positions {vocab}"]:
    """One bool per token; false for ids past the mask's end."""
    shifts = jnp.arange(32, dtype=allowed.dtype)[None, None, None]
    bits = ((allowed[..., None] >> shifts) & 1) != 0
    flat = bits.reshape(*allowed.shape[:2], -1)[..., :vocab]
    return jnp.pad(flat, ((0, 0), (0, 0), (0, vocab - flat.shape[2])))
