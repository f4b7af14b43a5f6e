"""Log-probabilities of tokens: the target's own, from the calls that read and score them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax.decoding.rows import write_rows
from spec_jax.pytree import pytree


@pytree
class Logprobs:
    """Log-probabilities at each token of a row by the logits as they are, before any processor.

    Generated tokens have them and, on request, the tokens of a prompt after its first.

    Attributes:
      chosen: of the token itself.
      ranks: how many tokens are likelier, and one more.
      top: of the likeliest tokens at its position, from the likeliest on.
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
        tokens: Int[Array, "batch length"],
        lengths: Int[Array, " batch"],
    ) -> "Logprobs":
        """Records the log-probabilities of one round's tokens.

        Args:
          logits: of the target, after the last token of the text and along the accepted draft.
          tokens: the rows, with the round's tokens.
          lengths: of the rows before the round.
        """
        steps = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
        token_ids = jnp.take_along_axis(tokens, lengths[:, None] + steps, axis=1)
        return write_rows(self, logprobs_of(logits, token_ids, self.top.shape[-1]), lengths)


def logprobs_of(
    logits: Float[Array, "batch positions vocab"],
    token_ids: Int[Array, "batch positions"],
    top: int,
) -> Logprobs:
    """Log-probabilities of tokens from the logits in their places.

    Args:
      logits: of the target in each place.
      token_ids: the token in each place.
      top: how many of the likeliest tokens to name; static.
    """
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), -1)
    of_tokens = jnp.take_along_axis(logprobs, token_ids[..., None], axis=-1)
    likeliest, ids = jax.lax.top_k(logprobs, top)
    return Logprobs(
        chosen=of_tokens[..., 0],
        ranks=(logprobs > of_tokens).sum(-1, dtype=jnp.int32) + 1,
        top=likeliest,
        top_ids=ids.astype(jnp.int32),
    )
