"""What changes logits before they are warped, at every place of a draft.

The order is that of Hugging Face transformers' `_get_logits_processor`: bias, repetition penalty,
bad words, min tokens, allowed tokens; presence and frequency penalties follow the OpenAI API,
after the repetition penalty. A place sees the tokens that stand before it, drafted ones included.
Tokens are counted and banned by comparing ids, never by scatters or gathers along the vocabulary,
so the vocabulary may stay sharded. A step that no row of the batch uses is skipped on device; a
row that does not use a step passes through it bit for bit.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32, UInt32

from spec_jax.config import SamplingParams
from spec_jax.pytree import pytree


@pytree
class BatchSampling:
    """The `SamplingParams` of each row as arrays; dynamic under jit.

    Attributes:
      stop_token_ids: tokens that end the row, which `min_tokens` forbids; padded with -1.
      bad_words: the token sequences that must not stand in the row, each at the end of its
        entry; padded with -1.
    """

    temperature: Float[Array, " batch"]
    top_k: Int[Array, " batch"]
    top_p: Float[Array, " batch"]
    min_p: Float[Array, " batch"]
    repetition_penalty: Float[Array, " batch"]
    presence_penalty: Float[Array, " batch"]
    frequency_penalty: Float[Array, " batch"]
    logit_bias: Float[Array, "batch vocab"]
    min_tokens: Int[Array, " batch"]
    stop_token_ids: Int[Array, "batch stops"]
    bad_words: Int[Array, "batch words longest"]

    @classmethod
    def stack(
        cls,
        rows: Sequence[SamplingParams],
        vocab_size: int,
        stop_token_ids: Sequence[Sequence[int]] = (),
        bad_words: Sequence[Sequence[Sequence[int]]] = (),
    ) -> "BatchSampling":
        """One array entry per request.

        Args:
          rows: the requests' parameters.
          vocab_size: the model's.
          stop_token_ids: what ends each request, end-of-sequence tokens included.
          bad_words: the token sequences that `SamplingParams.bad_words` means. Both may be
            shorter than `rows`: further rows have none. Their sizes are rounded up to powers of
            two, so that few programs are compiled.
        """

        def column(name: str, dtype: type) -> Array:
            return jnp.asarray(np.array([getattr(row, name) for row in rows], dtype))

        bias = np.zeros((len(rows), vocab_size), np.float32)
        for i, row in enumerate(rows):
            for token, value in row.logit_bias.items():
                bias[i, token] = value
        stops = np.full((len(rows), _room(map(len, stop_token_ids))), -1, np.int32)
        for i, ids in enumerate(stop_token_ids):
            stops[i, : len(ids)] = ids
        longest = _room(len(word) for words in bad_words for word in words)
        banned = np.full((len(rows), _room(map(len, bad_words)), longest), -1, np.int32)
        for i, words in enumerate(bad_words):
            for j, word in enumerate(words):
                banned[i, j, longest - len(word) :] = word
        return cls(
            temperature=column("temperature", np.float32),
            # A top_k past the vocabulary keeps all of it, however large the number.
            top_k=jnp.asarray(np.array([min(row.top_k, vocab_size) for row in rows], np.int32)),
            top_p=column("top_p", np.float32),
            min_p=column("min_p", np.float32),
            repetition_penalty=column("repetition_penalty", np.float32),
            presence_penalty=column("presence_penalty", np.float32),
            frequency_penalty=column("frequency_penalty", np.float32),
            logit_bias=jnp.asarray(bias),
            min_tokens=column("min_tokens", np.int32),
            stop_token_ids=jnp.asarray(stops),
            bad_words=jnp.asarray(banned),
        )

    def repeat(self, times: int) -> "BatchSampling":
        """Each row's parameters `times` times in succession."""
        return jax.tree.map(lambda each: jnp.repeat(each, times, axis=0), self)

    @property
    def random(self) -> Bool[Array, ""]:
        """Whether any row draws at random; the others are greedy."""
        return (self.temperature > 0).any()

    @property
    def counts_tokens(self) -> Bool[Array, ""]:
        """Whether any row's penalties count the tokens before."""
        off = (
            (self.repetition_penalty == 1)
            & (self.presence_penalty == 0)
            & (self.frequency_penalty == 0)
        )
        return (~off).any()

    @property
    def bans_tokens(self) -> Bool[Array, ""]:
        """Whether any row has min_tokens or bad words."""
        return (self.min_tokens > 0).any() | (self.bad_words[:, :, -1] >= 0).any()


def _room(sizes) -> int:
    """The power of two that holds all sizes, at least 4."""
    return max(4, 1 << (max(sizes, default=1) - 1).bit_length())


@pytree
class History:
    """What the processors need to know of the tokens before a place.

    Attributes:
      prompt: how often each token stands in the prompt; zeros if no row's penalties count.
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
        shape = sampling.logit_bias.shape

        def count() -> tuple[Array, Array]:
            places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
            in_prompt = places < prompt_lengths[:, None]
            generated = ~in_prompt & (places < lengths[:, None])
            rows = jnp.arange(shape[0], dtype=jnp.int32)[:, None]
            zeros = jnp.zeros(shape, jnp.int32)
            return (
                zeros.at[rows, tokens].add(in_prompt.astype(jnp.int32)),
                zeros.at[rows, tokens].add(generated.astype(jnp.int32)),
            )

        def none() -> tuple[Array, Array]:
            return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.int32)

        prompt, generated = jax.lax.cond(sampling.counts_tokens, count, none)
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
    logits: Float[Array, "batch places vocab"],
    sampling: BatchSampling,
    history: History,
    following: Int[Array, "batch places_but_one"],
    ancestors: Bool[Array | np.ndarray, "places places_but_one"] | None = None,
    allowed: UInt32[Array, "batch places words"] | Int32[Array, "batch places words"] | None = None,
) -> Float[Array, "batch places vocab"]:
    """The logits after all that is not a matter of temperature or truncation.

    Arguments as for `sampling.probabilities`. A NaN stays a NaN.
    """
    before = _chain(logits.shape[1]) if ancestors is None else jnp.asarray(ancestors)
    logits = logits + sampling.logit_bias[:, None]
    logits = jax.lax.cond(
        sampling.counts_tokens,
        lambda: _penalise(logits, sampling, history, following, before),
        lambda: logits,
    )

    def ban() -> Array:
        banned = _banned(sampling, history, following, before)
        ids = jnp.arange(logits.shape[2], dtype=jnp.int32)
        is_banned = (banned[:, :, :, None] == ids[None, None, None]).any(2)
        return jnp.where(is_banned, logits - jnp.inf, logits)

    logits = jax.lax.cond(sampling.bans_tokens, ban, lambda: logits)
    if allowed is None:
        return logits
    return jnp.where(_unpack(allowed, logits.shape[2]), logits, logits - jnp.inf)


def _chain(places: int) -> Bool[Array, "places places_but_one"]:
    """The ancestors in a draft that is no tree: all tokens before a place."""
    return jnp.tri(places, places - 1, -1, dtype=bool)


def _penalise(
    logits: Float[Array, "batch places vocab"],
    sampling: BatchSampling,
    history: History,
    following: Int[Array, "batch places_but_one"],
    before: Bool[Array, "places places_but_one"],
) -> Float[Array, "batch places vocab"]:
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


def _banned(
    sampling: BatchSampling,
    history: History,
    following: Int[Array, "batch places_but_one"],
    before: Bool[Array, "places places_but_one"],
) -> Int[Array, "batch places bans"]:
    """The tokens that min_tokens and bad words forbid at each place; -1 forbids nothing."""
    generated = history.lengths[:, None] + before.sum(1, dtype=jnp.int32)[None]
    early = generated < sampling.min_tokens[:, None]
    stops = jnp.where(early[:, :, None], sampling.stop_token_ids[:, None], -1)
    recent = _recent(history.recent, following, before)
    begin, last = sampling.bad_words[:, None, :, :-1], sampling.bad_words[:, None, :, -1]
    begun = ((begin < 0) | (begin == recent[:, :, None])).all(-1)
    return jnp.concatenate([stops, jnp.where(begun, last, -1)], axis=-1)


def _recent(
    recent: Int[Array, "batch recent"],
    following: Int[Array, "batch places_but_one"],
    before: Bool[Array, "places places_but_one"],
) -> Int[Array, "batch places recent"]:
    """The last tokens before each place, along the place's own path through the draft."""
    width = recent.shape[1]
    known = jnp.concatenate([recent, following], axis=1)
    visible = jnp.pad(before, ((0, 0), (width, 0)), constant_values=True)
    # How far back each visible token stands from the place.
    back = jnp.cumsum(visible[:, ::-1], axis=1, dtype=jnp.int32)[:, ::-1]
    wanted = jnp.arange(width, 0, -1, dtype=jnp.int32)
    found = visible[:, None] & (back[:, None] == wanted[None, :, None])
    return known[:, jnp.argmax(found, -1)]


def _unpack(
    allowed: UInt32[Array, "batch places words"] | Int32[Array, "batch places words"], vocab: int
) -> Bool[Array, "batch places {vocab}"]:
    """One bool per token; false for ids past the mask's end."""
    shifts = jnp.arange(32, dtype=allowed.dtype)[None, None, None]
    bits = ((allowed[..., None] >> shifts) & 1) != 0
    flat = bits.reshape(*allowed.shape[:2], -1)[..., :vocab]
    return jnp.pad(flat, ((0, 0), (0, 0), (0, vocab - flat.shape[2])))
