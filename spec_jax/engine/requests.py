"""Requests, and the arrays that a batch of them is padded to."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from spec_jax.config import SamplingParams
from spec_jax.engine.batch_shape import BatchShape, source_shape
from spec_jax.models.config import TransformerConfig
from spec_jax.models.source import EncoderInput
from spec_jax.text.grammar import Grammar


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """One row of a batch: token ids, how to sample them, and what ends them.

    Attributes:
      prompt_token_ids: the prompt.
      sampling: how to sample.
      key: the row's randomness, as PRNG key data.
      stop_token_ids: tokens that end it.
      max_length: length at which it must end, the prompt included.
      bad_words: token sequences that must not be generated.
      grammar: the grammar of the output; it advances with the row, so two requests never share one.
      source: what the target's encoder reads: int32 [tokens], or float32 [frames, bins] of a
        spectrum, always as many frames as the encoder takes; None without an encoder.
      timestamps: the first timestamp token, if the output obeys Whisper's rules of timestamps.
      may_draft: whether the drafter reads the prompt; otherwise the row decodes plainly.
      prediction: tokens that the output may resemble, for drafters that use them.
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
    may_draft: bool = True
    prediction: Sequence[int] = ()

    @property
    def text_token_ids(self) -> Sequence[int]:
        """The tokens that the request was made from: the encoder's input, if the target has one."""
        if self.source is not None and self.source.ndim == 1:
            return self.source.tolist()
        return self.prompt_token_ids

    @property
    def source_digest(self) -> str | None:
        """A checksum of what the encoder reads, by which processes compare it."""
        return None if self.source is None else hashlib.sha256(self.source.tobytes()).hexdigest()


@dataclasses.dataclass(frozen=True)
class RequestInput:
    """The prompt of a request, tokenized; fields are the same as in `Request`."""

    prompt_token_ids: list[int]
    source: np.ndarray | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    timestamps: int = -1

    @classmethod
    def of(cls, config: TransformerConfig, token_ids: Sequence[int]) -> "RequestInput":
        """From a prompt; an encoder reads it, and the decoder starts from `decoder_start`."""
        if config.encoder is None or config.encoder.mel_bins:
            return cls(list(token_ids))
        return cls(list(config.decoder_start), np.array(token_ids, np.int32))

    def __len__(self) -> int:
        """Tokens of the decoder's text."""
        return len(self.prompt_token_ids)

    def then(self, token_ids: Sequence[int]) -> "RequestInput":
        """The same with more tokens."""
        return dataclasses.replace(self, prompt_token_ids=[*self.prompt_token_ids, *token_ids])


def batch_of(
    sources: Sequence[np.ndarray | None], rows: int, shape: tuple[int, ...] | None = None
) -> EncoderInput | None:
    """The sources of requests, padded to `shape` and to `rows` rows; None without any.

    A row without a source has a single position.
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
    return EncoderInput(values, lengths)


PADDING = Request(
    [0],
    SamplingParams(max_tokens=1),
    np.zeros((2,), np.uint32),
    (),
    max_length=1,
    may_draft=False,
)
"""Fills a slot without a request; it has finished before the first round."""


def pad(requests: Sequence[Request], shape: BatchShape) -> dict[str, Any]:
    """Left-aligned arrays of the requests; padding rows hold one token and start finished."""
    tokens = np.zeros((shape.batch, shape.capacity), np.int32)
    lengths = np.ones((shape.batch,), np.int32)
    max_lengths = np.ones((shape.batch,), np.int32)
    keys = np.zeros((shape.batch, 2), np.uint32)
    may_draft = np.zeros((shape.batch,), np.bool_)
    predictions = np.full((shape.batch, 2), shape.capacity, np.int32)
    for row, request in enumerate(requests):
        ids = request.prompt_token_ids
        tokens[row, : len(ids)] = ids
        lengths[row], max_lengths[row] = len(ids), request.max_length
        keys[row], may_draft[row] = request.key, request.may_draft
        # At the end, where the text comes last; a drafter leaves out what the text has reached.
        if prediction := request.prediction[: shape.capacity - len(ids)]:
            predictions[row, 0] = shape.capacity - len(prediction)
            tokens[row, predictions[row, 0] :] = prediction
    return {
        "tokens": tokens,
        "lengths": lengths,
        "max_lengths": max_lengths,
        "keys": keys,
        "may_draft": may_draft,
        "predictions": predictions,
        "source": batch_of([each.source for each in requests], shape.batch, shape.source),
    }
