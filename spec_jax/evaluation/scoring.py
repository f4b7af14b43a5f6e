"""The target's own logits of given texts, without speculation."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from spec_jax import distributed
from spec_jax.engine.batch_shape import MIN_BLOCK
from spec_jax.engine.requests import RequestInput, batch_of
from spec_jax.models.cache import KVCache
from spec_jax.models.model import Model
from spec_jax.models.output import TargetOutput
from spec_jax.models.prefill import prefill
from spec_jax.models.source import EncoderInput

_Arrays = tuple[Any, Any, EncoderInput | None]
"""A prompt's tokens, their count, and the source."""


class Scorer:
    """Teacher-forced logits of texts that continue a prompt: `rows` texts of `width` tokens."""

    def __init__(self, model: Model, *, rows: int, width: int):
        self.model, self._width = model, width
        self._num_shards = model.placement.num_shards("batch")
        self.rows = -(-rows // self._num_shards) * self._num_shards
        self._score = model.jit(self._logits)

    def logits(
        self, prompt: RequestInput, texts: Int[np.ndarray, "count width"]
    ) -> Float[np.ndarray, "count width vocab"]:
        """The logits that predict each token of each text.

        Args:
          prompt: what the texts start from, at least one token.
          texts: at most `rows` continuations, each `width` tokens long.
        """
        last = np.full((len(texts), 1), prompt.prompt_token_ids[-1], np.int32)
        tail = np.concatenate([last, texts[:, :-1]], axis=1).astype(np.int32)
        tail = np.pad(tail, ((0, self.rows - len(texts)), (0, 0)))
        arrays = jax.tree.map(
            lambda each: np.repeat(each, self._num_shards, axis=0), _padded(prompt, self._width)
        )
        logits = distributed.to_host(self._score(self.model, arrays, tail))
        return logits[: len(texts)]

    def _logits(self, model: Model, arrays: _Arrays, tail: Array) -> Array:
        # Read once, the prompt is the same for every text.
        texts = self.rows // self._num_shards
        cache = jax.tree.map(lambda leaf: jnp.repeat(leaf, texts, axis=0), _read(model, *arrays))
        return _logits(model.score(tail, cache))


def step_by_step(
    model: Model, prompt: RequestInput, text: Sequence[int], width: int
) -> Float[np.ndarray, " vocab"]:
    """The logits after `prompt + text`, whose text is scored `width` tokens a call.

    Plain decoding scores one token a call; a round of speculation several.
    """
    tokens = [prompt.prompt_token_ids[-1], *text]
    calls = -(-len(tokens) // width)
    padded = np.zeros((calls * width,), np.int32)
    padded[: len(tokens)] = tokens
    # A single bfloat16 row is scored together with a throw-away token.
    arrays = jax.tree.map(jnp.asarray, _padded(prompt, calls * width + 1))
    cache = model.jit(_read)(model, *arrays)
    logits: Any = None
    step = model.jit(_step)
    for call in range(calls):
        piece = padded[None, call * width : (call + 1) * width]
        logits, cache = step(model, jnp.asarray(piece), cache)
    return distributed.to_host(logits)[0, (len(tokens) - 1) % width]


def _padded(prompt: RequestInput, room: int) -> _Arrays:
    """A batch of one prompt, with room for more, in whole blocks."""
    capacity = -(-(len(prompt) + room) // MIN_BLOCK) * MIN_BLOCK
    tokens = np.zeros((1, capacity), np.int32)
    tokens[0, : len(prompt)] = prompt.prompt_token_ids
    return tokens, np.array([len(prompt)], np.int32), batch_of([prompt.source], 1)


def _read(model: Model, tokens: Array, lengths: Array, source: EncoderInput | None) -> KVCache:
    cache = model.new_cache(*tokens.shape)
    if source is not None:
        cache = dataclasses.replace(cache, encoded=model.encode(source)[0])
    return prefill(model, tokens, lengths - 1, cache, MIN_BLOCK)


def _step(model: Model, tokens: Array, cache: KVCache) -> tuple[Array, KVCache]:
    output = model.score(tokens, cache)
    return _logits(output), output.cache.with_lengths(cache.lengths + tokens.shape[1])


def _logits(output: TargetOutput) -> Array:
    assert output.logits is not None
    return output.logits
