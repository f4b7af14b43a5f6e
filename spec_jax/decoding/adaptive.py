"""The adaptive draft length: measured costs and each row's own acceptances choose K."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax.decoding.draft_length import DraftLengthPolicy, DraftOutcome, halvings
from spec_jax.decoding.rows import insert_rows
from spec_jax.pytree import pytree
from spec_jax.sampling.draw import argmax


@pytree
class AdaptiveState:
    """Statistics of each row's drafts, and the measured costs of rounds.

    Attributes:
      accepted: how many drafted tokens were accepted; older ones count less.
      judged: how many drafted tokens were accepted or rejected; older ones count less.
      idle: rounds since the row last drafted.
      patience: rounds that a row whose drafts do not pay waits before it drafts a token again.
      costs: the seconds of a round for each of the policy's choices of K.
      forced: the K of every row while costs are measured; -1 otherwise.
    """

    accepted: Float[Array, " batch"]
    judged: Float[Array, " batch"]
    idle: Int[Array, " batch"]
    patience: Int[Array, " batch"]
    costs: Float[Array, " choices"]
    forced: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class Adaptive(DraftLengthPolicy):
    """Drafts the number of tokens that should give the most tokens per second, which may be 0.

    With an acceptance rate of a, a round of K drafted tokens emits (1 - a^(K+1)) / (1 - a) tokens
    of a row (Leviathan et al. 2023, arXiv 2211.17192, equation 1), and the cost of a round is
    measured. The rows of a batch are scored at one width, so they share one K: the one with which
    all of them together emit the most tokens per second. If plain decoding is faster, K is 0, and a
    single token is drafted from time to time to check whether that has changed: after 8 rounds, and
    after twice as many each time drafting still does not pay. If it did not pay in the request
    before, the first wait is up to 32 rounds.

    The costs depend on the machine, and so do the rounds: unlike under the other policies, the
    tokens of a sampled request may differ from run to run. Their distribution does not change.

    Attributes:
      num_speculative_tokens: the largest number of tokens per round.
    """

    num_speculative_tokens: int = 8
    reproducible = False
    memory = 0.97
    """The factor by which each judged token reduces the weight of those before it."""
    prior_rate, prior_tokens = 0.7, 3.0
    """The acceptance rate before any request, and judged tokens that such a rate counts for."""
    first_patience, most_inherited_patience, last_patience = 8, 32, 256

    @property
    def choices(self) -> tuple[int, ...]:
        """The values of K: the compiled scoring widths."""
        return halvings(self.num_speculative_tokens)

    def init(self, batch: int) -> AdaptiveState:
        """Some confidence in the drafter, and costs that the host replaces by measured ones."""
        judged = jnp.full((batch,), self.prior_tokens, jnp.float32)
        return AdaptiveState(
            accepted=self.prior_rate * judged,
            judged=judged,
            idle=jnp.zeros((batch,), jnp.int32),
            patience=jnp.full((batch,), self.first_patience, jnp.int32),
            costs=1.0 + 0.1 * jnp.asarray(self.choices, jnp.float32),
            forced=jnp.int32(-1),
        )

    def limits(self, state: AdaptiveState, running: Bool[Array, " batch"]) -> Int[Array, " batch"]:
        """The best K, or one token to check whether drafting pays; the same for all rows."""
        best = self._best(state, running)
        trying = (best == 0) & (running & (state.idle >= state.patience)).any()
        chosen = jnp.where(trying, min(1, self.num_speculative_tokens), best)
        return jnp.broadcast_to(jnp.where(state.forced >= 0, state.forced, chosen), running.shape)

    def min_width(self, state: AdaptiveState) -> Int[Array, ""]:
        """While costs are measured, drafts that turn out short are scored like long ones."""
        return jnp.maximum(state.forced, 0)

    def update(self, state: AdaptiveState, outcome: DraftOutcome) -> AdaptiveState:
        """Counts what verification judged: the accepted tokens and the first rejected one."""
        accepted, drafted = outcome.accepted, outcome.drafted
        has_drafted = drafted > 0
        tried = has_drafted & (state.forced < 0) & (self._best(state, has_drafted) == 0)
        judged = (accepted + (accepted < drafted).astype(jnp.int32)).astype(jnp.float32)
        fade = self.memory**judged
        state = dataclasses.replace(
            state,
            accepted=fade * state.accepted + accepted.astype(jnp.float32),
            judged=fade * state.judged + judged,
            idle=jnp.where(has_drafted, 0, state.idle + 1),
        )
        pays = has_drafted & (self._best(state, has_drafted) > 0)
        longer = jnp.minimum(2 * state.patience, self.last_patience)
        waits = jnp.where(tried, longer, state.patience)
        return dataclasses.replace(
            state, patience=jnp.where(pays, self.first_patience, waits).astype(jnp.int32)
        )

    def insert(
        self, state: AdaptiveState, slots: Int[Array, "shards inserted"], rows: AdaptiveState
    ) -> AdaptiveState:
        """Statistics of drafts come from the rows; the batch keeps its costs of rounds."""
        names = ("accepted", "judged", "idle", "patience")
        old, new = ({name: getattr(each, name) for name in names} for each in (state, rows))
        return dataclasses.replace(state, **insert_rows(old, slots, new))

    def _best(self, state: AdaptiveState, rows: Bool[Array, " batch"]) -> Int[Array, ""]:
        """The K with which these rows together emit the most tokens per second."""
        choices = jnp.asarray(self.choices, jnp.int32)
        # A rate of 1 would divide by zero, and is never certain.
        rate = jnp.clip(state.accepted / state.judged, 0.0, 0.999)[:, None]
        tokens = (1.0 - rate ** (choices + 1).astype(jnp.float32)[None]) / (1.0 - rate)
        total = jnp.where(rows[:, None], tokens, 0.0).sum(0)
        return choices[argmax(total / state.costs)]
