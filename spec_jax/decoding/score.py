"""Scoring: the target's distributions after each row's text and after each draft token."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from spec_jax.decoding.state import DecodeState
from spec_jax.drafters.base import Draft
from spec_jax.models.attention_mask import AttentionMask
from spec_jax.models.cache import KVCache
from spec_jax.models.model import Model
from spec_jax.models.output import TargetOutput
from spec_jax.sampling.parameters import BatchSampling
from spec_jax.sampling.probabilities import likeliest, probabilities
from spec_jax.sampling.processors import History, process
from spec_jax.sharding import Placement


def kv_slots_per_round(scoring: str, lookahead: int, num_drafts: int) -> int:
    """The largest number of KV slots that scoring writes past a row's computed tokens."""
    if scoring == "prefix_batch":
        return (lookahead + 1) * (lookahead + 2) // 2
    return 1 + lookahead * num_drafts


def headroom(block: int, scoring: str, lookahead: int, num_drafts: int) -> int:
    """The largest number of KV slots that a call writes past a row's text: a block, or a round."""
    # One more for the token beside a single bfloat16 row, see `Model.score`.
    return max(block, kv_slots_per_round(scoring, lookahead, num_drafts) + 1)


class Scored(NamedTuple):
    """A target call over the last token of the text and the draft.

    Attributes:
      p: the distributions after the last token of the text and after each draft token; None if
        all rows are greedy.
      greedy_tokens: then the likeliest token at each of these positions, -1 where the target gives
        no distribution; otherwise None.
      logits: the logits that these were made from, before all processors.
      features: the target's features at the same tokens, or None; see `TargetOutput`.
      cache: the cache with these tokens, which its lengths do not count yet.
      likeliest: the likeliest token at each position, if the drafter needs it; -1 as above.
    """

    p: Float[Array, "batch positions vocab"] | None
    greedy_tokens: Int[Array, "batch positions"] | None
    logits: Float[Array, "batch positions vocab"]
    features: Float[Array, "batch positions taps embed"] | None
    cache: KVCache
    likeliest: Int[Array, "batch positions"] | None = None

    def with_likeliest(
        self, placement: Placement, num_tokens: Int[Array, " batch"] | None
    ) -> "Scored":
        """The same with `likeliest`; for the arguments see `sampling.probabilities.likeliest`."""
        if self.greedy_tokens is not None:
            return self._replace(likeliest=self.greedy_tokens)
        return self._replace(likeliest=likeliest(self.logits, placement, num_tokens))

    def along(
        self, draft: Draft, path: Int[Array, "batch lookahead"], lengths: Int[Array, " batch"]
    ) -> "Scored":
        """What one of each row's drafts was scored with, p left out; see `Draft.path`."""
        if draft.num_drafts == 1:
            return self
        scored = jnp.pad(path + 1, ((0, 0), (1, 0)))
        features, tokens = self.features, self.likeliest
        if features is not None:
            features = jnp.take_along_axis(features, scored[..., None, None], axis=1)
        if tokens is not None:
            tokens = jnp.take_along_axis(tokens, scored, axis=1)
        return self._replace(
            logits=jnp.take_along_axis(self.logits, scored[..., None], axis=1),
            features=features,
            likeliest=tokens,
            cache=self.cache.gather(lengths[:, None] + path, lengths),
        )


class HiddenStates(NamedTuple):
    """The layers of a target call over the longest draft, before `score` applies the head.

    Attributes:
      hidden: the input of the final norm after the last token of the text and each draft token.
      features: the target's features at the same tokens, or None; see `TargetOutput`.
      num_tokens: how many of a row's tokens are scored; the others were not computed.
    """

    hidden: Float[Array, "batch positions embed"]
    features: Float[Array, "batch positions taps embed"] | None
    num_tokens: Int[Array, " batch"]

    def output(self, target: Model, count: int, cache: KVCache) -> TargetOutput:
        """The output of a call over the first `count` tokens."""
        logits = target.logits(self.hidden[:, :count], self.num_tokens)
        features = None if self.features is None else self.features[:, :count]
        return TargetOutput(logits, features, cache)


@jax.named_scope("score")
def hidden_states(
    target: Model,
    state: DecodeState,
    draft: Draft,
    num_tokens: Int[Array, " batch"],
    feature_layers: Sequence[int] = (),
) -> tuple[HiddenStates, KVCache]:
    """The layers of a target call that skips padding, and the cache with the tokens.

    They are compiled once, while `score` is compiled for each width of a round.

    Args:
      target: a model that `skips_padding`.
      state: the rows.
      draft: one draft of each row.
      num_tokens: how many tokens of each row are scored, the last token of its text included.
      feature_layers: the features to return, see `TargetOutput` (static).
    """
    layers = *feature_layers, target.config.num_layers
    _, features, cache = target.prefill(_tokens(state, draft), state.cache, num_tokens, layers)
    assert features is not None
    hidden, features = features[:, :, -1], features[:, :, :-1] if feature_layers else None
    return HiddenStates(hidden, features, num_tokens), cache


def _tokens(state: DecodeState, draft: Draft) -> Int[Array, "batch positions"]:
    """The last token of each row's text and its draft."""
    last = jax.vmap(lambda row, length: row[length - 1])(state.tokens, state.lengths)
    return jnp.concatenate([last[:, None], jnp.maximum(draft.tokens, 0)], axis=1)


@jax.named_scope("score")
def score(
    target: Model,
    state: DecodeState,
    draft: Draft,
    sampling: BatchSampling,
    scoring: str = "block",
    allowed: UInt32[Array, "batch positions words"] | None = None,
    feature_layers: Sequence[int] = (),
    computed: HiddenStates | None = None,
) -> Scored:
    """The target's distributions p after each row's text and after each draft token.

    The processors at a query position see the tokens before it in the same draft.

    Args:
      target: the model that scores.
      state: the rows.
      draft: their draft tokens.
      sampling: their sampling parameters.
      scoring: how the target is called (static). `block`: once over all tokens side by side.
        `prefix_batch`: once over the K + 1 prefixes of the draft as a batch, each in separate
        KV slots after the cached text that all share (called "stairs" in IVUS 2024).
      allowed: packed sets of the tokens that a grammar allows at each position.
      feature_layers: the features to return, see `TargetOutput` (static).
      computed: the layers' outputs for this draft or a longer one, which the state's cache holds.
    """
    tokens = _tokens(state, draft)
    cache, layers = state.cache, tuple(feature_layers)
    if computed is not None:
        out = computed.output(target, tokens.shape[1], cache)
    elif draft.partial is not None:
        out = target.run_remaining_layers(
            draft.partial.hidden, cache, draft.partial.num_layers, layers
        )
    elif scoring == "prefix_batch":
        out = _score_prefixes(target, tokens, cache, layers)
    else:
        mask = None
        if draft.num_drafts > 1:
            mask = mask_of_drafts(cache, draft.lookahead, draft.num_drafts)
        out = target.score(tokens, cache, mask, feature_layers=layers)
    assert out.logits is not None
    history = History.of(state.tokens, state.lengths, state.prompt_lengths, sampling)
    ancestors = None
    if draft.num_drafts > 1:
        ancestors = drafted_before(draft.lookahead, draft.num_drafts)
    p = greedy_tokens = None
    placement, num_tokens = target.placement, None if computed is None else computed.num_tokens
    if sampling.features.random:
        p = probabilities(
            out.logits, sampling, history, draft.tokens, ancestors, allowed, placement, num_tokens
        )
    else:
        logits = process(out.logits, sampling, history, draft.tokens, ancestors, allowed)
        greedy_tokens = likeliest(logits, placement, num_tokens)
    return Scored(p, greedy_tokens, out.logits, out.features, out.cache)


def drafted_before(steps: int, num_drafts: int) -> Bool[np.ndarray, "positions drafted"]:
    """[i, j]: whether query position i follows draft token j in the same draft."""
    return _seen_in_tree(steps, num_drafts)[:, 1:]


def _seen_in_tree(steps: int, num_drafts: int) -> Bool[np.ndarray, "positions positions"]:
    """[i, j]: whether query position i sees token j: itself and the tokens before it in its draft.

    Position 0 is the last token of the text, and `1 + i * drafts + n` is token i of draft n.
    """
    step = np.concatenate([[-1], np.repeat(np.arange(steps), num_drafts)])
    draft = np.concatenate([[-1], np.tile(np.arange(num_drafts), steps)])
    same = (draft[:, None] == draft[None]) | (draft[None] < 0)
    return same & (step[None] <= step[:, None])


def mask_of_drafts(cache: KVCache, steps: int, num_drafts: int) -> AttentionMask:
    """Several drafts of each row, side by side: each sees the text and its own tokens."""
    depths = np.concatenate([[0], np.repeat(np.arange(1, steps + 1), num_drafts)])
    return AttentionMask.branching(cache, depths, _seen_in_tree(steps, num_drafts))


def _score_prefixes(
    target: Model,
    tokens: Int[Array, "batch positions"],
    cache: KVCache,
    feature_layers: Sequence[int],
) -> TargetOutput:
    """Scores every prefix of the tokens separately; logits and features at its last token."""
    count = tokens.shape[1]
    # The whole draft comes first, so that it is in the KV slots right after the text.
    sizes = range(count, 0, -1)
    prefix = np.concatenate([np.full(size, size) for size in sizes])
    depths = np.concatenate([np.arange(size) for size in sizes])
    seen = (prefix[:, None] == prefix[None]) & (depths[None] <= depths[:, None])
    ends = np.cumsum(list(sizes))[::-1] - 1
    mask = AttentionMask.branching(cache, depths, seen)
    return target.score(
        tokens[:, depths], cache, mask, ends.tolist(), feature_layers=feature_layers
    )
