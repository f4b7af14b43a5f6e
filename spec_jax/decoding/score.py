"""Scoring: one target call over the last known token and the draft."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spec_jax.decoding.cache import KVCache
from spec_jax.decoding.processors import BatchSampling, History
from spec_jax.decoding.sampling import probabilities
from spec_jax.decoding.state import DecodeState
from spec_jax.drafters.base import Draft
from spec_jax.models.transformer import Model


def score(
    target: Model, state: DecodeState, draft: Draft, sampling: BatchSampling
) -> tuple[Float[Array, "batch places vocab"], KVCache]:
    """The target's distributions p at the K + 1 places after each row's known tokens.

    The processors at a place see the draft tokens before it. The returned cache holds the entries
    of all K + 1 tokens, none of them counted yet.
    """
    last = jax.vmap(lambda row, length: row[length - 1])(state.tokens, state.lengths)
    tokens = jnp.concatenate([last[:, None], draft.tokens], axis=1)
    logits, cache = target.score(tokens, state.cache)
    history = History.of(state.tokens, state.lengths, state.prompt_lengths, sampling)
    return probabilities(logits, sampling, history, draft.tokens), cache
