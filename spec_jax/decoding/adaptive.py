"""The adaptive draft length: measured costs and each row's own acceptances choose K."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from spec_jax.decoding.draft_length import DraftLengthPolicy, DraftOutcome, halvings
from spec_jax.decoding.rows import insert_rows
from spec_jax.pytree import pytree
from spec_jax.sampling.draw import argmax

MAX_RATE = 0.999
"""A rate of 1 would divide by zero, and is never certain."""


@pytree
class AdaptiveState:
    """Statistics of each row's drafts, and the measured costs of rounds.

    Attributes:
      accepted: how many drafted tokens were accepted; older ones count less.
      judged: how many drafted tokens were accepted or rejected; older ones count less.
      lost: time by which drafting was slower than plain decoding, in rounds without a draft; older
        time counts less.
      spent: time of the row's rounds, in the same unit; older time counts less.
      credit: time that earlier drafts have gained, in the same unit, up to `Adaptive.max_credit`.
      costs: the seconds of a round for each of the policy's choices.
      forced: the K of every row while costs are measured; -1 otherwise.
    """

    accepted: Float[Array, " batch"]
    judged: Float[Array, " batch"]
    lost: Float[Array, " batch"]
    spent: Float[Array, " batch"]
    credit: Float[Array, " batch"]
    costs: Float[Array, " choices"]
    forced: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class Adaptive(DraftLengthPolicy):
    """Drafts the number of tokens that should give the most tokens per second, which may be 0.

    With an acceptance rate of a, a round of K drafted tokens emits (1 - a^(K+1)) / (1 - a) tokens
    of a row (Leviathan et al. 2023, arXiv 2211.17192, equation 1), and the cost of a round is
    measured. The rows of a batch are scored at one width, so they share one K: the one with which
    all of them together emit the most tokens per second. If plain decoding is faster, K is 0, and a
    single token is drafted from time to time to check whether that has changed, as long as drafts
    that did not pay have taken at most a hundredth of the time. If drafts that should pay lose what
    earlier ones have gained, `max_credit` at most, and two hundredths more, K is 0 as well, until
    they are made up for.

    A greedy drafter that knows its confidence drafts up to the largest K where drafting pays, and
    stops where another token would not: where the probability that it is accepted, times the time
    that a token takes, is less than its cost. The probability is the product of the draft's
    confidences and the acceptance rate (cf. dynamic speculation, arXiv 2405.04304).

    One token is scored like two: each width costs a compilation, and these two take about as long
    to score.

    The costs depend on the machine, and so do the rounds: unless verification is coupled, the
    tokens of a sampled request may differ from run to run. Their distribution does not change.

    Attributes:
      num_speculative_tokens: the largest number of tokens per round.
    """

    num_speculative_tokens: int = 8
    reproducible = False
    memory = 0.97
    """The factor by which each judged token reduces the weight of those before it."""
    prior_rate, prior_tokens = 0.85, 8.0
    """The acceptance rate before any request, and judged tokens that such a rate counts for. It is
    high, so that a draft is tried once: later processes know the rate of earlier requests."""
    max_lost = 0.01
    """The share of its time that a row may lose by drafts that only check whether drafting pays."""
    max_mistaken, mistaken_rounds = 0.02, 2.0
    """The share of its time, and rounds beside it, that a row may lose by drafts that should pay
    and do not; then it decodes plainly until its time has grown."""
    max_credit = 16.0
    """Rounds that drafts which should pay may lose first, out of what earlier ones have gained. A
    new drafter starts with them, so that no text's first words can end its drafts."""
    max_survival = 0.9
    """The survival with which drafting always goes on."""
    time_memory, idle_memory, idle_tokens = 0.998, 0.99, 6.0
    """The factors by which each round reduces the weight of earlier time, and each round without a
    draft the weight of judged tokens, down to this number."""

    @property
    def widths(self) -> tuple[int, ...]:
        """0 and powers of two, more or less; not 1, unless it is the largest."""
        longest = self.num_speculative_tokens
        return tuple(each for each in halvings(longest) if each != 1 or longest == 1)

    @property
    def choices(self) -> tuple[int, ...]:
        """The values of K."""
        return halvings(self.num_speculative_tokens)

    def seconds_saved(self, rate: float, costs: Float[np.ndarray, " choices"]) -> float:
        """The seconds that the best K saves of a round without a draft, for each token."""
        tokens = _emitted(np.clip(rate, 0.0, MAX_RATE), np.array(self.choices))
        return float(costs[0] - np.min(costs / tokens))

    def init(self, batch: int) -> AdaptiveState:
        """Some confidence in the drafter, and costs that the host replaces by measured ones."""
        judged = jnp.full((batch,), self.prior_tokens, jnp.float32)
        return AdaptiveState(
            accepted=self.prior_rate * judged,
            judged=judged,
            lost=jnp.zeros((batch,), jnp.float32),
            spent=jnp.zeros((batch,), jnp.float32),
            credit=jnp.full((batch,), self.max_credit, jnp.float32),
            costs=1.0 + 0.1 * jnp.asarray(self.choices, jnp.float32),
            forced=jnp.int32(-1),
        )

    def limits(self, state: AdaptiveState, running: Bool[Array, " batch"]) -> Int[Array, " batch"]:
        """The best K, or one token to check whether drafting pays; the same for all rows."""
        best = self._expected(state, running)
        # A rejected token would be a loss of a round of one token less a round of none.
        lost = state.lost + state.costs[1] / state.costs[0] - 1.0
        left = jnp.where(running, self.max_lost * state.spent - lost, 0.0).sum()
        chosen = jnp.where((best == 0) & (left > 0), 1, best)
        return jnp.broadcast_to(jnp.where(state.forced >= 0, state.forced, chosen), running.shape)

    def confident_limits(
        self, state: AdaptiveState, running: Bool[Array, " batch"]
    ) -> tuple[Int[Array, " batch"], Float[Array, " batch"]]:
        """The largest K where drafting pays, and the survival at which another token pays."""
        limits, longest = self.limits(state, running), self.num_speculative_tokens
        free = (self._expected(state, running) > 0) & (state.forced < 0)
        tokens, rate = self._tokens(state, running)
        # A row's further token costs its share of what all rows' tokens cost.
        seconds = state.costs[-1] - state.costs[1]
        rows = jnp.maximum(running.sum(dtype=jnp.int32), 1) * max(longest - 1, 1)
        a_token = 1.0 / jnp.max(tokens / state.costs)
        least = seconds / rows.astype(jnp.float32) / (a_token * rate)
        least = jnp.clip(least, 0.0, self.max_survival)
        return jnp.where(free, longest, limits), jnp.where(free, least, 0.0)

    def min_width(self, state: AdaptiveState) -> Int[Array, ""]:
        """While costs are measured, drafts that turn out short are scored like long ones."""
        return jnp.maximum(state.forced, 0)

    def update(self, state: AdaptiveState, outcome: DraftOutcome) -> AdaptiveState:
        """Counts what verification judged: the accepted tokens and the first rejected one."""
        accepted, drafted = outcome.accepted, outcome.drafted
        judged = (accepted + (accepted < drafted).astype(jnp.int32)).astype(jnp.float32)
        idle_fade = jnp.maximum(self.idle_memory, jnp.minimum(self.idle_tokens / state.judged, 1.0))
        fade = jnp.where(drafted > 0, self.memory**judged, idle_fade)
        measuring = state.forced >= 0
        times = {
            name: jnp.where(measuring, getattr(state, name), new)
            for name, new in self._times(state, outcome).items()
        }
        return dataclasses.replace(
            state,
            accepted=fade * state.accepted + accepted.astype(jnp.float32),
            judged=fade * state.judged + judged,
            **times,
        )

    def _times(
        self, state: AdaptiveState, outcome: DraftOutcome
    ) -> dict[str, Float[Array, " batch"]]:
        """The times of a state after a round."""
        drafted, choices = outcome.drafted, jnp.asarray(self.choices, jnp.float32)
        cost = jnp.interp(drafted.max().astype(jnp.float32), choices, state.costs) / state.costs[0]
        lost = cost - (outcome.accepted + 1).astype(jnp.float32)
        # Drafts that only check whether drafting pays take no credit.
        should_pay = self._best(state, drafted > 0) > 0
        by_credit = jnp.where(should_pay, jnp.clip(lost, 0.0, state.credit), 0.0)
        lost = self.time_memory * state.lost + lost - by_credit
        credit = state.credit - by_credit + jnp.maximum(-lost, 0.0)
        return {
            "lost": jnp.maximum(lost, 0.0),
            "spent": self.time_memory * state.spent + cost,
            "credit": jnp.minimum(credit, self.max_credit),
        }

    def insert(
        self, state: AdaptiveState, slots: Int[Array, "shards inserted"], rows: AdaptiveState
    ) -> AdaptiveState:
        """Statistics of drafts come from the rows; the batch keeps its costs of rounds."""
        names = ("accepted", "judged", "lost", "spent", "credit")
        old, new = ({name: getattr(each, name) for name in names} for each in (state, rows))
        return dataclasses.replace(state, **insert_rows(old, slots, new))

    def _expected(self, state: AdaptiveState, running: Bool[Array, " batch"]) -> Int[Array, ""]:
        """The best K, or 0 where drafts that should have paid have lost too much."""
        # A rate says too much where later drafted tokens are accepted less often than the first.
        excess = jnp.where(running, state.lost - self.max_mistaken * state.spent, 0.0).sum()
        mistaken = excess > self.mistaken_rounds * running.sum(dtype=jnp.float32)
        return jnp.where(mistaken, 0, self._best(state, running))

    def _best(self, state: AdaptiveState, rows: Bool[Array, " batch"]) -> Int[Array, ""]:
        """The K with which these rows together emit the most tokens per second."""
        tokens, _ = self._tokens(state, rows)
        return jnp.asarray(self.choices, jnp.int32)[argmax(tokens / state.costs)]

    def _tokens(
        self, state: AdaptiveState, rows: Bool[Array, " batch"]
    ) -> tuple[Float[Array, " choices"], Float[Array, " batch"]]:
        """Tokens that these rows together emit in a round of each K; all rows' acceptance rates."""
        rate = jnp.clip(state.accepted / state.judged, 0.0, MAX_RATE)
        tokens = _emitted(rate[:, None], jnp.asarray(self.choices, jnp.float32)[None])
        return jnp.where(rows[:, None], tokens, 0.0).sum(0), rate


def _emitted(rate: Any, widths: Any) -> Any:
    """Tokens of a round of each of these K, by the acceptance rate."""
    return (1.0 - rate ** (widths + 1)) / (1.0 - rate)
