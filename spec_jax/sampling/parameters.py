"""Sampling parameters as arrays: one entry a row."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from spec_jax.config import SamplingParams
from spec_jax.sharding.pytree import pytree


class Room(NamedTuple):
    """Sizes of the arrays that hold what a request may have several of: powers of two, static.

    Attributes:
      stops: stop tokens of a row.
      words: bad words of a row.
      longest: tokens of a bad word.
    """

    stops: int
    words: int
    longest: int

    @classmethod
    def of(
        cls,
        stop_token_ids: Sequence[Sequence[int]],
        bad_words: Sequence[Sequence[Sequence[int]]],
    ) -> "Room":
        """What holds all of these requests."""
        return cls(
            stops=_room(map(len, stop_token_ids)),
            words=_room(map(len, bad_words)),
            longest=_room(len(word) for words in bad_words for word in words),
        )


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
        room: Room | None = None,
    ) -> "BatchSampling":
        """One array entry per request.

        Args:
          rows: the requests' parameters.
          vocab_size: the model's.
          stop_token_ids: what ends each request, end-of-sequence tokens included.
          bad_words: the token sequences that `SamplingParams.bad_words` means. Both may be
            shorter than `rows`: further rows have none.
          room: sizes of the arrays of both, at least those that these requests need, which are
            the default. Rows that are to join one batch must have the same.
        """
        room = room or Room.of(stop_token_ids, bad_words)

        def column(name: str, dtype: type) -> Array:
            return jnp.asarray(np.array([getattr(row, name) for row in rows], dtype))

        bias = np.zeros((len(rows), vocab_size), np.float32)
        for i, row in enumerate(rows):
            for token, value in row.logit_bias.items():
                bias[i, token] = value
        stops = np.full((len(rows), room.stops), -1, np.int32)
        for i, ids in enumerate(stop_token_ids):
            stops[i, : len(ids)] = ids
        banned = np.full((len(rows), room.words, room.longest), -1, np.int32)
        for i, words in enumerate(bad_words):
            for j, word in enumerate(words):
                banned[i, j, room.longest - len(word) :] = word
        return cls(
            temperature=jnp.asarray(_temperatures(rows)),
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


def _temperatures(rows: Sequence[SamplingParams]) -> np.ndarray:
    """Each row's temperature; 0 for those that devices would flush to it, or not."""
    found = np.array([row.temperature for row in rows]).astype(np.float32)
    return np.where(found < np.finfo(np.float32).tiny, np.float32(0), found)


def _room(sizes) -> int:
    """The power of two that holds all sizes, at least 4, so that few programs are compiled."""
    return max(4, 1 << (max(sizes, default=1) - 1).bit_length())
