"""An exact decoder that shares no code with the loop, and the distribution that it draws from.

The reference is written for clarity: numpy, float64, sorts, one token at a time, no cache reuse.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from spec_jax.config import SamplingParams
from spec_jax.models.model import Model
from spec_jax.models.source import EncoderInput


def reference_probabilities(
    logits: Float[np.ndarray, " vocab"],
    context: Sequence[int],
    prompt_length: int,
    params: SamplingParams,
    *,
    stop_token_ids: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    allowed: Collection[int] | None = None,
) -> Float[np.ndarray, " vocab"]:
    """The distribution of the next token, by sorting, in float64 (see `SamplingParams`).

    Args:
      logits: the model's.
      context: prompt and output so far.
      prompt_length: how many tokens of the context are the prompt's.
      params: how to sample; texts in it play no part.
      stop_token_ids: tokens that end the request, which `min_tokens` forbids.
      bad_words: token sequences that must not come about.
      allowed: the only tokens that a grammar allows here; None without a grammar.
    """
    x = np.asarray(logits, np.float64).copy()
    for token, bias in params.logit_bias.items():
        x[token] += bias
    seen = sorted(set(context))
    x[seen] = np.where(
        x[seen] > 0, x[seen] / params.repetition_penalty, x[seen] * params.repetition_penalty
    )
    generated = np.bincount(np.asarray(context[prompt_length:], np.int64), minlength=len(x))
    x -= params.presence_penalty * (generated > 0) + params.frequency_penalty * generated
    for word in bad_words:
        begin = list(word[:-1])
        if begin == list(context[len(context) - len(begin) :]):
            x[word[-1]] = -np.inf
    if len(context) - prompt_length < params.min_tokens:
        x[list(stop_token_ids)] = -np.inf
    if allowed is not None:
        x[[token for token in range(len(x)) if token not in allowed]] = -np.inf
    if params.temperature == 0:
        return one_hot(np.asarray(x.argmax()), len(x))

    def softmax(x: np.ndarray) -> np.ndarray:
        weights = np.exp(x - x.max())
        return weights / weights.sum()

    x = x / params.temperature
    if params.top_k:
        kth = np.sort(x)[::-1][min(params.top_k, len(x)) - 1]
        x = np.where(x < kth, -np.inf, x)
    if params.top_p < 1:
        probs = softmax(x)
        order = np.argsort(-probs, kind="stable")
        above = np.cumsum(probs[order]) - probs[order]
        x[order[above >= params.top_p]] = -np.inf
    probs = softmax(x)
    return softmax(np.where(probs < params.min_p * probs.max(), -np.inf, x))


def one_hot(tokens: Int[np.ndarray, "*lead"], vocab: int) -> Float[np.ndarray, "*lead vocab"]:
    """The distributions that are certain of these tokens."""
    probs = np.zeros((*tokens.shape, vocab))
    np.put_along_axis(probs, tokens[..., None].astype(np.int64), 1.0, axis=-1)
    return probs


class ReferenceDecoder:
    """Decodes a model one token at a time from scratch: slow, simple, and the ground truth.

    `source` are the token ids that its encoder reads, if it has one.
    """

    def __init__(self, model: Model, source: Sequence[int] | None = None):
        self.model = model

        def all_logits(model: Model, tokens: jax.Array) -> jax.Array:
            cache = model.new_cache(*tokens.shape)
            if source is not None:
                ids, length = jnp.asarray([list(source)], jnp.int32), len(source)
                encoded, _ = model.encode(EncoderInput(ids, jnp.full((1,), length, jnp.int32)))
                cache = dataclasses.replace(cache, encoded=encoded)
            logits = model.score(tokens, cache).logits
            assert logits is not None
            return logits[0]

        self._all_logits = model.jit(all_logits)

    def logits(self, context: Sequence[int]) -> Float[np.ndarray, " vocab"]:
        """The model's logits after a context."""
        # Padded to few shapes; what stands after a token cannot change its logits.
        tokens = np.zeros((1, -(-len(context) // 64) * 64), np.int32)
        tokens[0, : len(context)] = context
        return np.asarray(self._all_logits(self.model, jnp.asarray(tokens)))[len(context) - 1]

    def distribution(
        self, context: Sequence[int], prompt_length: int, params: SamplingParams, **options: Any
    ) -> Float[np.ndarray, " vocab"]:
        """The exact distribution of the token after a context; see `reference_probabilities`."""
        return reference_probabilities(
            self.logits(context), context, prompt_length, params, **options
        )

    def joint(
        self, prompt: Sequence[int], length: int, params: SamplingParams, **options: Any
    ) -> Float[np.ndarray, "..."]:
        """The exact joint distribution of the first `length` tokens, one axis per token."""

        def extend(context: list[int], left: int) -> np.ndarray:
            first = self.distribution(context, len(prompt), params, **options)
            if left == 1:
                return first
            zeros = np.zeros((len(first),) * (left - 1))
            return np.stack(
                [
                    probability * extend([*context, token], left - 1) if probability else zeros
                    for token, probability in enumerate(first)
                ]
            )

        return extend(list(prompt), length)

    def greedy(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        stop_token_ids: Sequence[int] = (),
        max_length: int | None = None,
        **options: Any,
    ) -> tuple[list[int], str]:
        """Greedy tokens and finish reason, stopping exactly where the definition says."""
        context, options = list(prompt), options | {"stop_token_ids": stop_token_ids}
        while True:
            token = int(self.distribution(context, len(prompt), params, **options).argmax())
            context.append(token)
            generated = len(context) - len(prompt)
            if token in stop_token_ids:
                return context[len(prompt) :], "stop"
            if generated == params.token_limit or len(context) == max_length:
                return context[len(prompt) :], "length"
