"""The base of every drafter: pure functions around one explicit state."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from spec_jax.models.cache import KVCache
from spec_jax.models.source import EncoderInput
from spec_jax.pytree import pytree, static
from spec_jax.sampling.keys import child_key
from spec_jax.sampling.parameters import BatchSampling


@pytree
class Context:
    """The rows that a drafter drafts for.

    Attributes:
      tokens: prompt and output; only the first `lengths` of each row are valid.
      lengths: the number of tokens of each row.
      prompt_lengths: how many of them are the prompt's.
      keys: randomness of this round's draft.
      target_keys: the keys with which the target will draw the next tokens, if only tokens equal to
        the target's are accepted (verification `coupled`). A draft that is drawn with them is
        equal most often, and needs no `Draft.probs`. Otherwise None.
      sampling: the parameters of the requests; drafts are sampled with the same.
      limits: how many tokens each row may draft at most in this round; 0 for a row that has ended.
      threshold: a row stops drafting after a token of a lower probability than this; None if
        no row does.
      least_survival: a row stops drafting when the product of its tokens' probabilities is below
        this; None if no row does.
      cache: the target's cache, for drafters that are part of the target.
      fixed_length: whether every row drafts K tokens in every round, or as many as it has room
        for. Then a loop of fixed length is best, which accelerators run without asking the host.
        Static.
    """

    tokens: Int[Array, "batch length"]
    lengths: Int[Array, " batch"]
    prompt_lengths: Int[Array, " batch"]
    keys: Key[Array, " batch"]
    sampling: BatchSampling
    limits: Int[Array, " batch"]
    target_keys: Key[Array, "batch lookahead"] | None = None
    threshold: Float[Array, " batch"] | None = None
    least_survival: Float[Array, " batch"] | None = None
    cache: KVCache | None = None
    fixed_length: bool = static(default=False)

    def token_keys(self, step: int | Int[Array, ""], num_drafts: int) -> Key[Array, "batch drafts"]:
        """The keys with which a drafter draws the tokens of a step, one for each draft of a row."""
        drafts = step * num_drafts + jnp.arange(num_drafts, dtype=jnp.int32)
        keys = child_key(jnp.repeat(self.keys[:, None], num_drafts, axis=1), drafts[None])
        if self.target_keys is None:
            return keys
        # Other drafts need other tokens, and draw independently.
        shared = jax.lax.dynamic_slice_in_dim(self.target_keys, step, 1, axis=1)
        return jnp.concatenate([shared, keys[:, 1:]], axis=1)


@pytree
class PartialForward:
    """The part of the target's call that the drafter has already computed.

    Attributes:
      hidden: hidden states after the target's first layers, of the last token of the text and each
        draft token.
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
      probs: q, exactly the distribution that each token was drawn from, or None if the drafter is
        deterministic and every q is one-hot. `coupled` verification does not use it.
      lengths: how many steps each row proposes.
      num_drafts: drafts of each row; static.
      is_certain: the tokens whose q is one-hot, whatever `probs` holds for them. None means all
        tokens if `probs` is None, and otherwise no token.
      partial: the part of the target's call that the drafter has already computed.
      confidence: the drafter's confidence in each token, if there is a threshold: the probability
        of the token under q, for a greedy row at temperature 1.
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
        """The largest number of steps of a row's draft (K); static."""
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
      before: the number of tokens of each row before the round.
      lengths: the number of tokens after the round. A running row gains the accepted tokens and one
        more.
      draft_index: which of several drafts was accepted.
      features: the target's features of `Drafter.feature_layers`, of the token at `before - 1` and
        of the next tokens along the accepted draft; the first `lengths - before` count.
      scored_tokens: the token at `before - 1` and the accepted draft's tokens, rejected ones too,
        for a drafter that `needs_likeliest`.
      likeliest: the target's likeliest token after each of them; -1 where it gave none, and after
        tokens that were not drafted.
    """

    tokens: Int[Array, "batch length"]
    before: Int[Array, " batch"]
    lengths: Int[Array, " batch"]
    draft_index: Int[Array, " batch"]
    features: Float[Array, "batch positions taps embed"] | None = None
    scored_tokens: Int[Array, "batch positions"] | None = None
    likeliest: Int[Array, "batch positions"] | None = None


@pytree
class DrafterPrompt:
    """The prompts of the rows.

    Attributes:
      tokens: the prompts, left-aligned.
      lengths: tokens of each.
      inputs: the inputs that the drafter's host side has made, if it has one.
      source: the encoder's input, with the output of the target's encoder.
      block: tokens that are computed at a time; static.
      predictions: where in `tokens` each row's prediction begins and ends, a text that its output
        may resemble and that no model reads; None without any.
    """

    tokens: Int[Array, "batch length"]
    lengths: Int[Array, " batch"]
    inputs: PyTree = None
    source: EncoderInput | None = None
    block: int = static(default=1)
    predictions: Int[Array, "batch 2"] | None = None


@pytree
class PromptBlock:
    """The next tokens of each row's prompt, which the target has just computed.

    Attributes:
      tokens: the rows' prompts.
      lengths: tokens of each prompt. No block holds the last one.
      begin: where each row's block begins.
      num_tokens: how many tokens the row's block has; 0 if the prompt is complete.
      features: the target's features of `Drafter.feature_layers` at these tokens; the first
        `num_tokens` count.
      size: the largest number of tokens of a block; static.
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
      lookahead: the largest number of tokens that it proposes per round and draft (K).
      num_drafts: drafts that it proposes side by side.
      fixed_length: whether it always proposes as many tokens as its limit allows.
      has_confidence: whether it observes `Context.threshold` and `Context.least_survival`.
      uses_predictions: whether it drafts from `DrafterPrompt.predictions`.
      can_skip_prompts: whether rows whose prompts it did not read may exist beside rows that draft;
        it must then read a prompt whose beginning `copy_prefix` did not copy.
      needs_likeliest: whether it gets `Committed.likeliest`.
      feature_layers: the features of the target that it gets with each token of the text. Feature i
        is the residual stream after the target's first i layers: 0 is the embedding, and the number
        of layers is the input of the final norm.
    """

    lookahead: int
    num_drafts: int = 1
    fixed_length: bool = False
    has_confidence: bool = False
    uses_predictions: bool = False
    can_skip_prompts: bool = False
    needs_likeliest: bool = False
    feature_layers: tuple[int, ...] = ()

    def init(self, prompt: DrafterPrompt) -> PyTree:
        """The state before prefill: None, or arrays with the rows along axis 0."""

    def prefill(self, state: PyTree, block: PromptBlock) -> PyTree:
        """The state after the next tokens of the prompts, which the target has computed."""
        return state

    def propose(self, state: PyTree, context: Context) -> tuple[Draft, PyTree]:
        """Up to K tokens for each row."""
        raise NotImplementedError

    def commit(self, state: PyTree, committed: Committed) -> PyTree:
        """Adds the rows' new tokens to the state, and rolls back rejected tokens."""
        return state

    @property
    def copies_prefixes(self) -> bool:
        """Whether rows may begin with tokens that other rows have computed; see `copy_prefix`."""
        has_prefill = type(self).prefill is not Drafter.prefill
        return not has_prefill or type(self).copy_prefix is not Drafter.copy_prefix

    def copy_prefix(self, state: PyTree, other: PyTree, num_tokens: Int[Array, " batch"]) -> PyTree:
        """The state of rows whose first `num_tokens` were computed by other rows.

        A drafter with a `prefill` has to implement it, or its rows copy no prefix.

        Args:
          state: the state of the rows after `init`.
          other: the state of the other rows, the same number.
          num_tokens: how many tokens of each row `prefill` will not get. The texts of both rows
            agree in these and in the next one.
        """
        return state
