"""Requests, and the static shapes that a batch of them is padded to."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from spec_jax.config import SamplingParams
from spec_jax.models.config import TransformerConfig
from spec_jax.models.source import Source
from spec_jax.text.grammar import Grammar

MIN_CAPACITY = 256
MIN_BLOCK, MAX_BLOCK = 32, 512
CPU_BLOCK = 128
"""The largest block on CPU, where time grows with the tokens of a block, padding included, and a
short prompt is read by the program of the longest one of its call (benchmarks/LOG.md)."""
CHUNK_BYTES = 2**27
"""Bytes that the residual stream of what prefill reads at a time may take on a device."""
LEAST_CHUNK = 64
"""A chunk of fewer tokens of a row would be attended to densely, see `attention.fastest`."""


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
      source: what the target's encoder reads: int32 [tokens], or float32 [frames, bins] of a
        spectrum, always as many frames as the encoder takes; None without an encoder.
      timestamps: the first timestamp token, if the output obeys Whisper's rules of timestamps.
    """

    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    key: np.ndarray
    stop_token_ids: Sequence[int]
    max_length: int
    bad_words: Sequence[Sequence[int]] = ()
    grammar: Grammar | None = None
    source: np.ndarray | None = None
    timestamps: int = -1

    @property
    def text_token_ids(self) -> Sequence[int]:
        """The tokens that the request was made from: those that an encoder reads, if it has one."""
        if self.source is not None and self.source.ndim == 1:
            return self.source.tolist()
        return self.prompt_token_ids


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The static shapes of a batch; requests of one bucket share compiled programs.

    Attributes:
      batch: rows: a power of two, or the next multiple of the batch's num_shards in the layout.
      capacity: tokens a row has room for, K + 1 past its end included: a power of two, or the
        whole context.
      block: tokens of a prompt that are read at a time, a power of two; see `prompt_block`.
      stops: stop tokens a row has room for.
      source: the shape of a padded source; empty without an encoder.
      logprobs: how many of the likeliest tokens are kept beside each one; None if no
        log-probabilities are.
      prompt_logprobs: whether those of the prompts are kept too.
    """

    batch: int
    capacity: int
    block: int
    stops: int
    source: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: bool = False


def power_of_two(least: int, low: int = 1) -> int:
    """The smallest power of two that is at least `least` and `low`."""
    return max(low, 1 << (least - 1).bit_length() if least > 1 else 1)


def prompt_block(platform: str, longest: int, rows: int, embed_size: int) -> int:
    """Tokens of each prompt that prefill reads at a time, a power of two.

    Fewer the more rows are read together: what a chunk takes beside the caches grows with both, but
    not with the capacity, since the scores of `blocked` attention are bounded on their own.

    Args:
      platform: of the target.
      longest: tokens of the longest prompt.
      rows: rows that a device reads together.
      embed_size: width of the residual stream, which is float32.
    """
    largest = CPU_BLOCK if platform == "cpu" else MAX_BLOCK
    block = min(power_of_two(longest - 1, MIN_BLOCK), largest)
    while block > LEAST_CHUNK and 4 * rows * block * embed_size > CHUNK_BYTES:
        block //= 2
    return block


@dataclasses.dataclass(frozen=True)
class Start:
    """What a request starts from; all as in `Request`."""

    prompt_token_ids: list[int]
    source: np.ndarray | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    timestamps: int = -1

    @classmethod
    def of(cls, config: TransformerConfig, token_ids: Sequence[int]) -> "Start":
        """From a prompt; an encoder reads it while the decoder starts from tokens of its own."""
        if config.encoder is None or config.encoder.mel_bins:
            return cls(list(token_ids))
        return cls(list(config.decoder_start), np.array(token_ids, np.int32))

    def __len__(self) -> int:
        """Tokens of the decoder's text."""
        return len(self.prompt_token_ids)

    def then(self, token_ids: Sequence[int]) -> "Start":
        """The same with more tokens."""
        return dataclasses.replace(self, prompt_token_ids=[*self.prompt_token_ids, *token_ids])


def source_shape(sources: Sequence[np.ndarray | None]) -> tuple[int, ...]:
    """The shape that the sources of requests are padded to; empty if there are none."""
    shapes = [source.shape for source in sources if source is not None]
    longest = max((shape[0] for shape in shapes), default=0)
    if not shapes or len(shapes[0]) == 2:
        return shapes[0] if shapes else ()
    return (power_of_two(longest, MIN_BLOCK),)


def batch_of(
    sources: Sequence[np.ndarray | None], rows: int, shape: tuple[int, ...] | None = None
) -> Source | None:
    """The sources of requests, padded to `shape` and to so many rows; None if there are none.

    A row without one has a single position.
    """
    shape = source_shape(sources) if shape is None else shape
    if not shape:
        return None
    frames = len(shape) == 2
    values: Any = np.zeros((rows, *shape), np.float32 if frames else np.int32)
    lengths: Any = np.ones((rows,), np.int32)
    for row, source in enumerate(sources):
        if source is not None:
            values[row, : len(source)] = source
            lengths[row] = len(source) // (2 if frames else 1)
    return Source(values, lengths)


def pad(requests: Sequence[Request], bucket: Bucket) -> dict[str, Any]:
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
        "source": batch_of([each.source for each in requests], bucket.batch, bucket.source),
    }
