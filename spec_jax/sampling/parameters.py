"""Sampling parameters as arrays: one entry a row."""

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from spec_jax.config import SamplingParams
from spec_jax.pytree import pytree, static
from spec_jax.sharding import Placement

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclasses.dataclass(frozen=True)
class SamplingFeatures:
    """The steps that some row of a batch needs; static, so that programs hold no other steps.

    There are few and coarse features, since each set of them needs a separate program. A step does
    not change a row that does not need it, bit for bit.

    Attributes:
      random: some row draws at random; otherwise all are greedy.
      cut: some random row has a top_k, top_p or min_p.
      history: some row penalises or forbids tokens because of the tokens before them.
      timestamps: some row obeys Whisper's rules of timestamps.
    """

    random: bool = False
    cut: bool = False
    history: bool = False
    timestamps: bool = False

    @classmethod
    def of(
        cls,
        rows: Sequence[SamplingParams],
        bad_words: Sequence[Sequence[Sequence[int]]] = (),
        timestamps: Sequence[int] = (),
    ) -> "SamplingFeatures":
        """The features of these rows together; for the arguments see `BatchSampling.stack`."""
        has_timestamps = any(first >= 0 for first in timestamps)
        random = [row for row in rows if _temperature(row) > 0]
        return cls(
            random=bool(random),
            cut=any(row.top_k > 0 or row.top_p < 1 or row.min_p > 0 for row in random),
            history=has_timestamps or any(map(_needs_history, rows)) or any(map(len, bad_words)),
            timestamps=has_timestamps,
        )

    def broadened(self) -> "SamplingFeatures":
        """These features, and all others that take little time if no row uses them."""
        return dataclasses.replace(self, cut=self.random, history=True)

    def __or__(self, other: "SamplingFeatures") -> "SamplingFeatures":
        """The features that the rows of either need."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return SamplingFeatures(*(a or b for a, b in pairs))


@pytree
class BatchSampling:
    """The `SamplingParams` of each row as arrays; dynamic under jit, except the features.

    Attributes:
      is_biased: whether the row's `logit_bias` holds another number than zero.
      stop_token_ids: tokens that end the row; `min_tokens` forbids them at first. Padded with -1.
      bad_words: the token sequences that the row must not contain, each padded with -1 in front.
      timestamps: the first timestamp token of a row whose output obeys Whisper's rules; otherwise
        -1.
      features: the steps that some row needs.
      skips_unused: whether programs skip the steps that no row needs; static.
    """

    temperature: Float[Array, " batch"]
    top_k: Int[Array, " batch"]
    top_p: Float[Array, " batch"]
    min_p: Float[Array, " batch"]
    repetition_penalty: Float[Array, " batch"]
    presence_penalty: Float[Array, " batch"]
    frequency_penalty: Float[Array, " batch"]
    logit_bias: Float[Array, "batch vocab"]
    is_biased: Bool[Array, " batch"]
    min_tokens: Int[Array, " batch"]
    stop_token_ids: Int[Array, "batch stops"]
    bad_words: Int[Array, "batch words longest"]
    timestamps: Int[Array, " batch"]
    features: SamplingFeatures = static()
    skips_unused: bool = static(default=True)

    @classmethod
    def stack(
        cls,
        rows: Sequence[SamplingParams],
        vocab_size: int,
        stop_token_ids: Sequence[Sequence[int]] = (),
        bad_words: Sequence[Sequence[Sequence[int]]] = (),
        timestamps: Sequence[int] = (),
        placement: Placement = Placement.single_device(),
        *,
        stops: int = 0,
        words: tuple[int, int] = (0, 0),
        features: SamplingFeatures = SamplingFeatures(),
    ) -> "BatchSampling":
        """One array entry per request.

        Args:
          rows: the requests' parameters.
          vocab_size: the model's.
          stop_token_ids: what ends each request, end-of-sequence tokens included.
          bad_words: the token sequences of `SamplingParams.bad_words`. Rows past the end of
            `stop_token_ids`, `bad_words` or `timestamps` have none.
          timestamps: the first timestamp token of each request, or -1.
          placement: of the model that the batch is for.
          stops: the smallest number of stop tokens that a row has room for.
          words: the smallest number of bad words that a row has room for, and of tokens of each.
          features: the features that further rows of the batch need.
        """
        needed_stops, needed_words = list_sizes(stop_token_ids, bad_words)
        num_words, longest = map(max, words, needed_words)
        bias = np.zeros((len(rows), vocab_size), np.float32)
        stop_ids = np.full((len(rows), max(stops, needed_stops)), -1, np.int32)
        banned = np.full((len(rows), num_words, longest), -1, np.int32)
        first_timestamps = np.full((len(rows),), -1, np.int32)
        first_timestamps[: len(timestamps)] = timestamps
        for i, row in enumerate(rows):
            for token, value in row.logit_bias.items():
                bias[i, token] = value
            if row.allowed_token_ids is not None:
                banned_ids = np.ones((vocab_size,), bool)
                banned_ids[list(row.allowed_token_ids)] = False
                bias[i, banned_ids] = -np.inf
        for i, ids in enumerate(stop_token_ids):
            stop_ids[i, : len(ids)] = ids
        for i, row_words in enumerate(bad_words):
            for j, word in enumerate(row_words):
                banned[i, j, longest - len(word) :] = word
        arrays = {
            "temperature": np.array(list(map(_temperature, rows)), np.float32),
            # A top_k past the vocabulary keeps all of it, however large the number.
            "top_k": np.array([min(row.top_k, vocab_size) for row in rows], np.int32),
            "min_tokens": np.array([row.min_tokens for row in rows], np.int32),
            "logit_bias": bias,
            "is_biased": bias.any(1),
            "stop_token_ids": stop_ids,
            "bad_words": banned,
            "timestamps": first_timestamps,
        }
        for name in ("top_p", "min_p", *_PENALTIES):
            arrays[name] = np.array([getattr(row, name) for row in rows], np.float32)
        return cls(
            **{name: jnp.asarray(array) for name, array in arrays.items()},
            features=features | SamplingFeatures.of(rows, bad_words, timestamps),
            skips_unused=placement.skips_unused,
        )

    def repeat(self, times: int) -> "BatchSampling":
        """Each row's parameters `times` times in succession."""
        return jax.tree.map(lambda each: jnp.repeat(each, times, axis=0), self)


def _temperature(row: SamplingParams) -> float:
    """A row's temperature; 0 if some device cannot tell it from 0."""
    return row.temperature if row.temperature >= np.finfo(np.float32).tiny else 0.0


def _needs_history(row: SamplingParams) -> bool:
    return row.min_tokens > 0 or [getattr(row, name) for name in _PENALTIES] != [1, 0, 0]


MIN_BAD_WORDS = 64
"""Bad words of a row that every program has room for. Unused room takes no time if it is skipped
(`Placement.skips_unused`)."""


def list_sizes(
    stop_token_ids: Sequence[Sequence[int]], bad_words: Sequence[Sequence[Sequence[int]]]
) -> tuple[int, tuple[int, int]]:
    """Room for the stop tokens and the bad words of rows, from a ladder of powers of eight.

    Returns:
      The number of stop tokens of a row; the number of its bad words, and of the tokens of each.
    """
    lengths = (len(word) for words in bad_words for word in words)
    words = _power_of_eight(map(len, bad_words), MIN_BAD_WORDS), _power_of_eight(lengths)
    return _power_of_eight(map(len, stop_token_ids)), words


def _power_of_eight(sizes: Iterable[int], minimum: int = 8) -> int:
    """The power of eight that holds all sizes and `minimum`, so that few programs are compiled."""
    return 8 ** -(-(max(minimum, max(sizes, default=1)) - 1).bit_length() // 3)
