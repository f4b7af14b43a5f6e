"""Requests, and the static shapes that a batch of them is padded to."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from spec_jax.config import SamplingParams
from spec_jax.text.grammar import Grammar

MIN_CAPACITY = 256
MIN_BLOCK, MAX_BLOCK = 32, 512


@dataclasses.dataclass(frozen=True)
class Request:
    """One row of a batch: token ids, how to sample them, and what ends them.

    Attributes:
      prompt_token_ids: the prompt.
      sampling: how to sample.
      key: the row's randomness, as PRNG key data.
      stop_token_ids: tokens that end it.
      max_length: length at which it must end, the prompt included.
      bad_words: token sequences that must not be generated.
      grammar: the grammar of the output; it advances with the row, so requests never share it.
    """

    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    key: np.ndarray
    stop_token_ids: Sequence[int]
    max_length: int
    bad_words: Sequence[Sequence[int]] = ()
    grammar: Grammar | None = None


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The static shapes of a batch; requests of one bucket share compiled programs.

    Attributes:
      batch: rows: a power of two, or the next multiple of the batch's num_shards in the layout.
      capacity: tokens a row has room for, K + 1 past its end included: a power of two, or the
        whole context.
      block: tokens of a prompt that are read at a time, a power of two.
      stops: stop tokens a row has room for.
    """

    batch: int
    capacity: int
    block: int
    stops: int


def power_of_two(least: int, low: int = 1) -> int:
    """The smallest power of two that is at least `least` and `low`."""
    return max(low, 1 << (least - 1).bit_length() if least > 1 else 1)


def pad(requests: Sequence[Request], bucket: Bucket) -> dict[str, np.ndarray]:
    """Left-aligned arrays of the requests; padding rows hold one token and start finished."""
    tokens = np.zeros((bucket.batch, bucket.capacity), np.int32)
    lengths = np.ones((bucket.batch,), np.int32)
    max_lengths = np.ones((bucket.batch,), np.int32)
    stops = np.full((bucket.batch, bucket.stops), -1, np.int32)
    keys = np.zeros((bucket.batch, 2), np.uint32)
    for row, request in enumerate(requests):
        ids = request.prompt_token_ids
        tokens[row, : len(ids)] = ids
        lengths[row], max_lengths[row] = len(ids), request.max_length
        stops[row, : len(request.stop_token_ids)] = request.stop_token_ids
        keys[row] = request.key
    return {
        "tokens": tokens,
        "lengths": lengths,
        "max_lengths": max_lengths,
        "stop_token_ids": stops,
        "keys": keys,
    }
