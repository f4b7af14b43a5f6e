"""Log-probabilities of tokens: the target's own, from the calls that read and score them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.drafters.base import Draft
from spec_jax.sharding.pytree import pytree
from spec_jax.sharding.rows import write_rows


@pytree
class Logprobs:
    """Log-probabilities at each token of a row by the logits as they are, before any processor.

    They are known for generated tokens and, if they were asked for, for a prompt's after its first.

    Attributes:
      chosen: of the token itself.
      ranks: how many tokens are likelier, and one more.
      top: of the likeliest tokens in its place, in their order.
      top_ids: those tokens.
    """

    chosen: Float[Array, "batch length"]
    ranks: Int[Array, "batch length"]
    top: Float[Array, "batch length top"]
    top_ids: Int[Array, "batch length top"]

    @classmethod
    def zeros(cls, batch: int, length: int, top: int) -> "Logprobs":
        """Room for `top` likeliest tokens in each place."""
        return cls(
            chosen=jnp.zeros((batch, length), jnp.float32),
            ranks=jnp.zeros((batch, length), jnp.int32),
            top=jnp.zeros((batch, length, top), jnp.float32),
            top_ids=jnp.zeros((batch, length, top), jnp.int32),
        )

    def add(
        self,
        logits: Float[Array, "batch positions vocab"],
        draft: Draft,
        chosen: Int[Array, " batch"],
        tokens: Int[Array, "batch length"],
        lengths: Int[Array, " batch"],
    ) -> "Logprobs":
        """With what one round has scored.

        Args:
          logits: of the target, after the last known token and after each draft token.
          draft: what was scored.
          chosen: which draft of each row was kept.
          tokens: the rows, with the round's tokens.
          lengths: of the rows before the round.
        """
        width = draft.lookahead + 1
        steps = jnp.arange(width, dtype=jnp.int32)[None]
        if draft.drafts > 1:  # the path of the draft that was kept
            path = jnp.where(steps > 0, 1 + (steps - 1) * draft.drafts + chosen[:, None], 0)
            logits = jnp.take_along_axis(logits, path[..., None], axis=1)
        said = jnp.take_along_axis(tokens, lengths[:, None] + steps, axis=1)
        return write_rows(self, logprobs_of(logits, said, self.top.shape[-1]), lengths)


def logprobs_of(
    logits: Float[Array, "batch positions vocab"], said: Int[Array, "batch positions"], top: int
) -> Logprobs:
    """Log-probabilities in places whose logits are known.

    Args:
      logits: of the target in each place.
      said: the token in each place.
      top: how many of the likeliest tokens to name; static.
    """
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), -1)
    mine = jnp.take_along_axis(logprobs, said[..., None], axis=-1)
    likeliest, ids = jax.lax.top_k(logprobs, top)
    return Logprobs(
        chosen=mine[..., 0],
        ranks=(logprobs > mine).sum(-1, dtype=jnp.int32) + 1,
        top=likeliest,
        top_ids=ids.astype(jnp.int32),
    )
