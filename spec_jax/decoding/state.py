"""The loop's state: one documented pytree."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree, UInt32

from spec_jax.decoding.logprobs import Logprobs
from spec_jax.decoding.rows import write_rows
from spec_jax.models.cache import KVCache
from spec_jax.pytree import pytree

RUNNING, STOP, LENGTH, ERROR = range(4)
"""Values of `DecodeState.finish`: running; stop token; max_tokens or context edge; no valid p."""


@pytree
class Counters:
    """Counts of each row's rounds; tokens drafted past a stop are not counted.

    Attributes:
      rounds: target calls.
      drafted: proposed tokens.
      accepted: accepted tokens.
      accepted_per_position: for each draft position, how often its token was accepted.
      drafted_at: at the first token that a round emitted, one more than the number of tokens that
        the round drafted; 0 at all other tokens. The counters at any token follow from it.
    """

    rounds: Int[Array, " batch"]
    drafted: Int[Array, " batch"]
    accepted: Int[Array, " batch"]
    accepted_per_position: Int[Array, "batch lookahead"]
    drafted_at: Int[Array, "batch length"]

    @classmethod
    def zeros(cls, batch: int, lookahead: int, capacity: int) -> "Counters":
        """Before the first round."""
        # Separate arrays: donated buffers must not be shared.
        rounds, drafted, accepted = (jnp.zeros((batch,), jnp.int32) for _ in range(3))
        per_position = jnp.zeros((batch, lookahead), jnp.int32)
        drafted_at = jnp.zeros((batch, capacity), jnp.int32)
        return cls(rounds, drafted, accepted, per_position, drafted_at)

    def add(
        self,
        running: Bool[Array, " batch"],
        drafted: Int[Array, " batch"],
        accepted: Int[Array, " batch"],
        emitted: Int[Array, " batch"],
        lengths: Int[Array, " batch"],
        width: int,
    ) -> "Counters":
        """The counters after a round.

        Args:
          running: the rows that the round decoded.
          drafted: tokens that each row proposed.
          accepted: how many of them were accepted.
          emitted: tokens that each row gained.
          lengths: of the rows before the round.
          width: draft positions that were scored; static.
        """
        is_accepted = jnp.arange(width, dtype=jnp.int32)[None] < accepted[:, None]
        log = jnp.where(emitted > 0, drafted + 1, 0)[:, None]
        return Counters(
            rounds=self.rounds + running.astype(jnp.int32),
            drafted=self.drafted + drafted,
            accepted=self.accepted + accepted,
            accepted_per_position=self.accepted_per_position.at[:, :width].add(
                is_accepted.astype(jnp.int32)
            ),
            drafted_at=write_rows(self.drafted_at, log, lengths),
        )


@pytree
class DecodeState:
    """Everything that changes while a batch is decoded.

    The lengths of the target's cache count the computed tokens: between rounds all tokens of a row
    except the last, which the next round scores in front of the draft.

    Attributes:
      tokens: prompt and output; only the first `lengths` of each row are valid. The capacity
        leaves room for K + 1 tokens past a row's maximum length.
      lengths: the number of tokens of each row.
      prompt_lengths: how many of them are the prompt's.
      max_lengths: where each row must end: its max_tokens or the context's edge.
      finish: RUNNING, or why the row ended; finished rows are frozen.
      keys: each row's PRNG key data; a round's randomness is a function of it and the row's
        length alone.
      may_draft: the rows whose prompts the drafter has read; others decode plainly.
      cache: the target's cache.
      drafter: the drafter's state.
      draft_length: the state of the draft-length policy.
      counters: what the rounds did.
      logprobs: log-probabilities of the tokens, if they are recorded.
    """

    tokens: Int[Array, "batch length"]
    lengths: Int[Array, " batch"]
    prompt_lengths: Int[Array, " batch"]
    max_lengths: Int[Array, " batch"]
    finish: Int[Array, " batch"]
    keys: UInt32[Array, "batch 2"]
    may_draft: Bool[Array, " batch"]
    cache: KVCache
    drafter: PyTree
    draft_length: PyTree
    counters: Counters
    logprobs: Logprobs | None = None
