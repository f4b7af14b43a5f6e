"""Sampling parameters as arrays: one entry a row."""

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from spec_jax.config import SamplingParams
from spec_jax.pytree import pytree, static
from spec_jax.sharding import Placement


@dataclasses.dataclass(frozen=True)
class SamplingFeatures:
    """Which steps any row of a batch needs; static, so that programs hold no others.

    They are few and coarse, since each set of them is a program. A row that does not need a step
    passes through it bit for bit.

    Attributes:
      random: some row draws at random; otherwise all are greedy.
      cut: some random row has a top_k, top_p or min_p.
      history: some row penalises or forbids tokens by those that stand before them.
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
        """What these rows need, all together; arguments as for `BatchSampling.stack`."""
        timed = any(first >= 0 for first in timestamps)
        random = [row for row in rows if _temperature(row) > 0]
        return cls(
            random=bool(random),
            cut=any(row.top_k > 0 or row.top_p < 1 or row.min_p > 0 for row in random),
            history=timed or any(map(_needs_history, rows)) or any(map(len, bad_words)),
            timestamps=timed,
        )

    def broadened(self) -> "SamplingFeatures":
        """These and all others that take little time if no row uses them."""
        return dataclasses.replace(self, cut=self.random, history=True)

    def __or__(self, other: "SamplingFeatures") -> "SamplingFeatures":
        """What the rows of both need."""
        mine, others = dataclasses.astuple(self), dataclasses.astuple(other)
        return SamplingFeatures(*(a or b for a, b in zip(mine, others, strict=True)))


@pytree
class BatchSampling:
    """The `SamplingParams` of each row as arrays; dynamic under jit, but for the features.

    Attributes:
      stop_token_ids: tokens that end the row; `min_tokens` forbids them at first. Padded with -1.
      bad_words: the token sequences that must not stand in the row, each at the end of its
        entry; padded with -1.
      timestamps: each row's first timestamp token, from which on its output obeys Whisper's rules;
        -1 if there are none.
      features: the steps that any row needs.
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
          bad_words: the token sequences that `SamplingParams.bad_words` means. Both may be
            shorter than `rows`: further rows have none.
          timestamps: the first timestamp token of each request, or -1; may be shorter, too.
          placement: of the model that the batch is for.
          stops: stop tokens that a row has room for; more if a request has more.
          words: bad words that a row has room for, and tokens of each; more if a request has more.
          features: what further rows of the batch need.
        """
        needed_stops, needed_words = list_sizes(stop_token_ids, bad_words)
        stops = max(stops, needed_stops)
        num_words, longest = map(max, words, needed_words)

        def column(name: str, dtype: type) -> Array:
            return jnp.asarray(np.array([getattr(row, name) for row in rows], dtype))

        bias = np.zeros((len(rows), vocab_size), np.float32)
        for i, row in enumerate(rows):
            for token, value in row.logit_bias.items():
                bias[i, token] = value
            if row.allowed_token_ids is not None:
                banned_ids = np.ones((vocab_size,), bool)
                banned_ids[list(row.allowed_token_ids)] = False
                bias[i, banned_ids] = -np.inf
        stop_ids = np.full((len(rows), stops), -1, np.int32)
        for i, ids in enumerate(stop_token_ids):
            stop_ids[i, : len(ids)] = ids
        banned = np.full((len(rows), num_words, longest), -1, np.int32)
        for i, row_words in enumerate(bad_words):
            for j, word in enumerate(row_words):
                banned[i, j, longest - len(word) :] = word
        return cls(
            temperature=jnp.asarray(np.array(list(map(_temperature, rows)), np.float32)),
            # A top_k past the vocabulary keeps all of it, however large the number.
            top_k=jnp.asarray(np.array([min(row.top_k, vocab_size) for row in rows], np.int32)),
            top_p=column("top_p", np.float32),
            min_p=column("min_p", np.float32),
            repetition_penalty=column("repetition_penalty", np.float32),
            presence_penalty=column("presence_penalty", np.float32),
            frequency_penalty=column("frequency_penalty", np.float32),
            logit_bias=jnp.asarray(bias),
            min_tokens=column("min_tokens", np.int32),
            stop_token_ids=jnp.asarray(stop_ids),
            bad_words=jnp.asarray(banned),
            timestamps=jnp.asarray(
                np.array([*timestamps, *[-1] * (len(rows) - len(timestamps))], np.int32)
            ),
            features=features | SamplingFeatures.of(rows, bad_words, timestamps),
            skips_unused=placement.skips_unused,
        )

    def repeat(self, times: int) -> "BatchSampling":
        """Each row's parameters `times` times in succession."""
        return jax.tree.map(lambda each: jnp.repeat(each, times, axis=0), self)


def _temperature(row: SamplingParams) -> float:
    """A row's temperature; 0 if it is below what every device tells from 0."""
    return row.temperature if row.temperature >= np.finfo(np.float32).tiny else 0.0


def _needs_history(row: SamplingParams) -> bool:
    penalties = (row.repetition_penalty, row.presence_penalty, row.frequency_penalty)
    return row.min_tokens > 0 or penalties != (1, 0, 0)


MIN_BAD_WORDS = 64
"""Bad words of a row that every program has room for. Unused room takes no time where it is
skipped (`Placement.skips_unused`)."""


def list_sizes(
    stop_token_ids: Sequence[Sequence[int]], bad_words: Sequence[Sequence[Sequence[int]]]
) -> tuple[int, tuple[int, int]]:
    """Room for the stop tokens and the bad words of rows, from a ladder of powers of eight.

    Returns:
      Stop tokens of a row; and bad words of a row with the tokens of each.
    """
    lengths = (len(word) for words in bad_words for word in words)
    words = _power_of_eight(map(len, bad_words), MIN_BAD_WORDS), _power_of_eight(lengths)
    return _power_of_eight(map(len, stop_token_ids)), words


def _power_of_eight(sizes: Iterable[int], least: int = 8) -> int:
    """The power of eight that holds all sizes and `least`, so that few programs are compiled."""
    return 8 ** -(-(max(least, max(sizes, default=1)) - 1).bit_length() // 3)
