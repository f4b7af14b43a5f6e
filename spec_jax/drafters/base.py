"""The base of every drafter: pure functions around one explicit state."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from spec_jax.models.cache import KVCache
from spec_jax.models.source import EncoderInput
from spec_jax.pytree import pytree, static
from spec_jax.sampling.parameters import BatchSampling


@pytree
class Context:
    """The rows that a drafter drafts for.

    Attributes:
      tokens: prompt and output; only the first `lengths` of each row are valid.
      lengths: known tokens of each row.
      prompt_lengths: how many of them are the prompt's.
      keys: randomness of this round's draft.
      sampling: the parameters the request is sampled with; drafts use the same.
      limits: most tokens that each row may draft in this round; 0 for a row that has ended.
      threshold: a row stops drafting after a token of a lower probability than this; None if
        no row does.
      cache: the target's cache, for drafters that are part of the target.
      fixed_length: whether every row drafts K tokens in every round, or as many as it has room
        for: then a loop of fixed length, which accelerators run without asking the host, is best.
        Static.
    """

    tokens: Int[Array, "batch length"]
    lengths: Int[Array, " batch"]
    prompt_lengths: Int[Array, " batch"]
    keys: Key[Array, " batch"]
    sampling: BatchSampling
    limits: Int[Array, " batch"]
    threshold: Float[Array, " batch"] | None = None
    cache: KVCache | None = None
    fixed_length: bool = static(default=False)


@pytree
class PartialForward:
    """The part of the target's call that the drafter has already computed.

    Attributes:
      hidden: hidden states after the target's first layers, of the last known token and each draft
        token.
      cache: the target's cache with the keys and values of these tokens in those layers, which its
        lengths do not count yet; the loop uses it from here on.
      num_layers: how many layers; static.
    """

    hidden: Float[Array, "batch positions embed"]
    cache: KVCache | None
    num_layers: int = static()


@pytree
class Draft:
    """Proposed continuations of each row: one, or several side by side.

    Several drafts of a row are stored step by step: token `i * drafts + n` is the i-th of draft n.
    Drafts with a common prefix share one branch of a tree up to the end of that prefix.

    Attributes:
      tokens: the draft tokens. A token at or past `lengths` has no meaning; -1 ends its draft.
      probs: q, exactly the distribution each token was drawn from, or None if the drafter is
        deterministic and every q is one-hot.
      lengths: how many steps each row proposes.
      num_drafts: drafts of each row; static.
      is_certain: the tokens whose q is one-hot, whatever `probs` holds for them; None if those are
        all tokens without `probs`, and no token with them.
      partial: the part of the target's call that the drafter has already computed.
      confidence: how sure the drafter was of each token, if there is a threshold: q, for a greedy
        row at temperature 1.
    """

    tokens: Int[Array, "batch drafted"]
    probs: Float[Array, "batch drafted vocab"] | None
    lengths: Int[Array, " batch"]
    num_drafts: int = static(default=1)
    is_certain: Bool[Array, "batch drafted"] | None = None
    partial: PartialForward | None = None
    confidence: Float[Array, "batch drafted"] | None = None

    @property
    def lookahead(self) -> int:
        """Most steps of a row's draft (K); static."""
        return self.tokens.shape[1] // self.num_drafts

    def first(self, steps: int) -> "Draft":
        """The same draft, cut to `steps` (static), if no row proposes more."""
        count, partial = steps * self.num_drafts, self.partial
        return dataclasses.replace(
            self,
            tokens=self.tokens[:, :count],
            probs=None if self.probs is None else self.probs[:, :count],
            is_certain=None if self.is_certain is None else self.is_certain[:, :count],
            confidence=None if self.confidence is None else self.confidence[:, :count],
            partial=partial and dataclasses.replace(partial, hidden=partial.hidden[:, : steps + 1]),
        )

    def path(self, draft_index: Int[Array, " batch"]) -> Int[Array, "batch lookahead"]:
        """Where the tokens of one draft of each row are stored."""
        steps = jnp.arange(self.lookahead, dtype=jnp.int32)[None]
        return steps * self.num_drafts + draft_index[:, None]


@pytree
class Committed:
    """The result of a round's draft.

    Attributes:
      tokens: prompt and output after the round.
      before: known tokens of each row before the round.
      lengths: known tokens after the round: the accepted tokens and one more, or no more if the row
        had ended.
      draft_index: which of several drafts was kept.
      features: the target's features, as `Drafter.feature_layers` asks, of the token at
        `before - 1` and those after it along the kept draft; the first `lengths - before` count.
    """

    tokens: Int[Array, "batch length"]
    before: Int[Array, " batch"]
    lengths: Int[Array, " batch"]
    draft_index: Int[Array, " batch"]
    features: Float[Array, "batch positions taps embed"] | None = None


@pytree
class DrafterPrompt:
    """What the rows begin with.

    Attributes:
      tokens: the prompts, left-aligned.
      lengths: tokens of each.
      inputs: what the drafter's host side has made, if it has one.
      source: what an encoder reads, with the output of the target's.
      block: tokens that are read at a time; static.
    """

    tokens: Int[Array, "batch length"]
    lengths: Int[Array, " batch"]
    inputs: Any = None
    source: EncoderInput | None = None
    block: int = static(default=1)


@pytree
class PromptBlock:
    """The next tokens of each row's prompt, which the target has just read.

    Attributes:
      tokens: the rows' prompts.
      lengths: tokens of each prompt. No block holds the last one.
      begin: where each row's block begins.
      num_tokens: how many tokens the row's block has, 0 if it was read to its end before.
      features: the target's features at these tokens, as `Drafter.feature_layers` asks; the first
        `num_tokens` count.
      size: most tokens of a block; static.
    """

    tokens: Int[Array, "batch length"]
    lengths: Int[Array, " batch"]
    begin: Int[Array, " batch"]
    num_tokens: Int[Array, " batch"]
    features: Float[Array, "batch block taps embed"] | None = None
    size: int = static(default=1)

    @property
    def end(self) -> Int[Array, " batch"]:
        """Where each row's block ends."""
        return self.begin + self.num_tokens


class Drafter:
    """Proposes tokens. A drafter is a pytree: its weights are arguments of the loop.

    All attributes are static.

    Attributes:
      lookahead: most tokens that it proposes per round and draft (K).
      num_drafts: drafts that it proposes side by side.
      fixed_length: whether it always proposes as many tokens as its limit allows.
      feature_layers: the features of the target that it gets with each kept token. Feature i is the
        residual stream after the target's first i layers: 0 is the embedding, and the number of
        layers is the input of the final norm.
    """

    lookahead: int
    num_drafts: int = 1
    fixed_length: bool = False
    feature_layers: tuple[int, ...] = ()

    def init(self, prompt: DrafterPrompt) -> Any:
        """The state before the prompts are read: None, or arrays with the rows along axis 0."""

    def prefill(self, state: Any, block: PromptBlock) -> Any:
        """Reads the next tokens of the prompts, after the target has read them."""
        return state

    def propose(self, state: Any, context: Context) -> tuple[Draft, Any]:
        """Up to K tokens for each row."""
        raise NotImplementedError

    def commit(self, state: Any, committed: Committed) -> Any:
        """Updates the state to the rows' new tokens, and rolls back the rejected ones."""
        return state

    @property
    def copies_prefixes(self) -> bool:
        """Whether rows may begin with tokens that other rows have computed; see `copy_prefix`."""
        reads_prompts = type(self).prefill is not Drafter.prefill
        return not reads_prompts or type(self).copy_prefix is not Drafter.copy_prefix

    def copy_prefix(self, state: Any, other: Any, num_tokens: Int[Array, " batch"]) -> Any:
        """The state of rows whose first `num_tokens` were computed by other rows.

        A drafter with a `prefill` has to implement it, or no row begins in this way.

        Args:
          state: what `init` made of the rows.
          other: the state of as many other rows.
          num_tokens: how many tokens of each row `prefill` will not get. The texts of both rows
            agree in these and in the next one.
        """
        return state
