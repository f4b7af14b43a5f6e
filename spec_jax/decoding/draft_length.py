"""Draft-length policies: how many tokens each row may draft in the next round."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax.decoding.rows import insert_rows
from spec_jax.drafters.base import Draft
from spec_jax.pytree import pytree
from spec_jax.sampling.draw import argmax


@pytree
class DraftOutcome:
    """The result of a round's draft, without tokens past a stop.

    Attributes:
      drafted: tokens that each row drafted; 0 for finished rows.
      accepted: how many of them were accepted.
      confidence: the drafter's confidence in each token of the chosen draft; None if the policy
        does not use it.
    """

    drafted: Int[Array, " batch"]
    accepted: Int[Array, " batch"]
    confidence: Float[Array, "batch lookahead"] | None

    @classmethod
    def of(cls, draft: Draft, path: Array, drafted: Array, accepted: Array) -> "DraftOutcome":
        """The outcome with the confidence along the accepted draft; see `Draft.path`."""
        confidence = draft.confidence
        if confidence is not None:
            confidence = jnp.take_along_axis(confidence, path, axis=1)
        return cls(drafted, accepted, confidence)


class DraftLengthPolicy:
    """How much to draft: pure functions around a state. A policy is hashable and static under jit.

    Attributes:
      num_speculative_tokens: the largest number of tokens that a row drafts in a round (K).
      varies: whether rounds differ in how much they draft.
      reproducible: whether a sampled row's seed fixes its tokens, since no measured time is used.
      counts_rejected: whether rejected tokens count as drafted.
    """

    num_speculative_tokens: int
    varies: bool = True
    reproducible: bool = True
    counts_rejected: bool = True

    @property
    def widths(self) -> tuple[int, ...]:
        """The draft lengths at which rounds are scored, where drafts differ in length."""
        return halvings(self.num_speculative_tokens)

    def init(self, batch: int) -> Any:
        """The state before the first round."""

    def limits(self, state: Any, running: Bool[Array, " batch"]) -> Int[Array, " batch"]:
        """The largest number of tokens that each row may draft now; by default K."""
        return jnp.full(running.shape, self.num_speculative_tokens, jnp.int32)

    def min_width(self, state: Any) -> Int[Array, ""]:
        """How many draft tokens are scored at least, however few are drafted."""
        return jnp.int32(0)

    def threshold(self, state: Any, batch: int) -> Float[Array, " batch"] | None:
        """The drafter's probability below which a row stops drafting; None if it never does."""

    def confident_limits(
        self, state: Any, running: Bool[Array, " batch"]
    ) -> tuple[Int[Array, " batch"], Float[Array, " batch"]] | None:
        """`limits` for drafters that know their confidence, and the survival to draft on with.

        The survival of a draft is the probability that all of its tokens are accepted. None if the
        policy makes no difference.
        """

    def update(self, state: Any, outcome: DraftOutcome) -> Any:
        """The state after a round."""
        return state

    def insert(self, state: Any, slots: Int[Array, "shards inserted"], rows: Any) -> Any:
        """Puts rows into slots of a running state; for `slots` see `insert_rows`.

        Values that rows share, such as measured costs, do not change.
        """
        return insert_rows(state, slots, rows)


def scoring_widths(
    policy: DraftLengthPolicy, fixed_length: bool, consistent: bool = False
) -> tuple[int, ...]:
    """The draft lengths that are compiled: a round is scored at the smallest that holds it.

    The policy's widths if drafts differ in length; 0 and K if the drafter of a `Constant` policy
    may find nothing to propose; K alone if scoring must be consistent. Each width costs the
    compilation of a target call.
    """
    longest = policy.num_speculative_tokens
    if consistent:
        return (longest,)
    if not policy.varies:
        return (longest,) if fixed_length or not longest else (0, longest)
    return policy.widths


def halvings(longest: int) -> tuple[int, ...]:
    """0, ..., longest // 4, longest // 2, longest."""
    widths = {0}
    while longest:
        widths.add(longest)
        longest //= 2
    return tuple(sorted(widths))


@dataclasses.dataclass(frozen=True)
class Constant(DraftLengthPolicy):
    """The same K in every round."""

    num_speculative_tokens: int
    varies = False


@dataclasses.dataclass(frozen=True)
class Oracle(Constant):
    """For analysis: counts the drafts of a policy that knows the accepted tokens in advance.

    It drafts K tokens and pays for them, but counts only accepted tokens as drafted: the smallest
    number of draft steps with the same target calls (cf. arXiv 2405.04304, section 3).
    """

    counts_rejected = False


@dataclasses.dataclass(frozen=True)
class Heuristic(DraftLengthPolicy):
    """Two more after a fully accepted draft, otherwise one fewer (Hugging Face 2023).

    Attributes:
      num_speculative_tokens: the largest number of tokens per round.
      start: tokens of the first round.
    """

    num_speculative_tokens: int = 20
    start: int = 5

    def init(self, batch: int) -> Int[Array, " batch"]:
        """The first round's K."""
        return jnp.full((batch,), min(self.start, self.num_speculative_tokens), jnp.int32)

    def limits(
        self, state: Int[Array, " batch"], running: Bool[Array, " batch"]
    ) -> Int[Array, " batch"]:
        """The state is K itself."""
        return state

    def update(self, state: Int[Array, " batch"], outcome: DraftOutcome) -> Int[Array, " batch"]:
        """A round without a draft, which lookups may have, changes nothing."""
        all_accepted = outcome.accepted == outcome.drafted
        changed = jnp.where(all_accepted, state + 2, state - 1)
        changed = jnp.clip(changed, 1, self.num_speculative_tokens)
        return jnp.where(outcome.drafted > 0, changed, state)


@pytree
class ConfidenceCounts:
    """The drafter's confidence in accepted tokens, and in rejected tokens.

    Attributes:
      accepted: counts by confidence, in bins of equal width.
      rejected: counts by confidence, in the same bins.
    """

    accepted: Float[Array, "batch bins"]
    rejected: Float[Array, "batch bins"]


@dataclasses.dataclass(frozen=True)
class Confidence(DraftLengthPolicy):
    """Stops drafting after a token with a confidence below a threshold.

    The token itself is part of the draft (dynamic speculation, arXiv 2405.04304, like Hugging
    Face's `assistant_confidence_threshold`).

    Attributes:
      num_speculative_tokens: the largest number of tokens per round.
      start: the smallest probability with which drafting continues.
      retune: choose the threshold again after each round, from the row's own acceptances. It
        minimises the share of rejected tokens above it plus three times the share of accepted
        tokens below it, once more than five tokens of both kinds were seen.
    """

    num_speculative_tokens: int = 20
    start: float = 0.4
    retune: bool = False
    bins = 50

    def init(self, batch: int) -> ConfidenceCounts | None:
        """Nothing seen yet."""
        if not self.retune:
            return None
        accepted, rejected = (jnp.zeros((batch, self.bins), jnp.float32) for _ in range(2))
        return ConfidenceCounts(accepted, rejected)

    def threshold(self, state: ConfidenceCounts | None, batch: int) -> Float[Array, " batch"]:
        """The configured threshold, or the one chosen from the row's acceptances."""
        fixed = jnp.full((batch,), self.start, jnp.float32)
        if state is None:
            return fixed
        accepted, rejected = state.accepted.sum(-1), state.rejected.sum(-1)
        below = jnp.cumsum(state.accepted, -1) - state.accepted
        above = rejected[:, None] - (jnp.cumsum(state.rejected, -1) - state.rejected)
        false_stops = below / jnp.maximum(accepted, 1.0)[:, None]
        false_runs = above / jnp.maximum(rejected, 1.0)[:, None]
        best = argmax(-(false_runs + 3.0 * false_stops)).astype(jnp.float32)
        enough = (accepted > 0) & (rejected > 0) & (accepted + rejected > 5)
        return jnp.where(enough, best / self.bins, fixed)

    def update(
        self, state: ConfidenceCounts | None, outcome: DraftOutcome
    ) -> ConfidenceCounts | None:
        """Counts accepted tokens and the first rejected one; later tokens were not judged."""
        if state is None or outcome.confidence is None:
            return state
        at = jnp.clip((outcome.confidence * self.bins).astype(jnp.int32), 0, self.bins - 1)
        hit = at[..., None] == jnp.arange(self.bins, dtype=jnp.int32)[None, None]
        steps = jnp.arange(at.shape[1], dtype=jnp.int32)[None]
        num_accepted, drafted = outcome.accepted[:, None], outcome.drafted[:, None]
        accepted = hit & (steps < num_accepted)[..., None]
        rejected = hit & ((steps == num_accepted) & (num_accepted < drafted))[..., None]
        return ConfidenceCounts(
            accepted=state.accepted + accepted.sum(1, dtype=jnp.float32),
            rejected=state.rejected + rejected.sum(1, dtype=jnp.float32),
        )
