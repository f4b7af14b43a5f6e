"""Which tokens a new token sees, and how their scores become weights."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from spec_jax.models.cache import KVCache
from spec_jax.pytree import pytree, static


@dataclasses.dataclass(frozen=True)
class ScoreOptions:
    """The steps from products of queries and keys to the softmax; static under jit.

    Attributes:
      query_scalar: they are divided by its square root.
      cap: then they are `cap * tanh(score / cap)` (Gemma 2); None leaves them.
      slopes: then each head subtracts its slope times the distance of the key (ALiBi, arXiv
        2108.12409); empty for none.
      window: how many latest positions a token sees, itself included; None for all.
    """

    query_scalar: float
    cap: float | None = None
    slopes: tuple[float, ...] = ()
    window: int | None = None


@pytree
class AttentionMask:
    """The positions of new tokens, and which tokens each of them sees.

    New tokens are written side by side from index `start` on, whatever their positions. Each sees
    the text (all indices below `context_lengths`), and the tokens after the text that `tree_mask`
    names. A window is counted in positions. Without `causal` each sees the text and nothing else,
    wherever it stands itself.

    Attributes:
      positions: of each new token in its text.
      start: the index of each row's first new token.
      context_lengths: tokens of each row that all new tokens see; at most `start`.
      tree_mask: which of the tokens from index `context_lengths` on each new token sees, itself
        included. None if the new tokens follow one another, so that each sees all before it.
      depths: distance of those tokens from the text's end; only with `tree_mask`.
      num_tokens: how many of each row's new tokens are real; the others are padding, which is
        neither written nor seen. None if all are.
      causal: whether tokens are new ones that see what is before them; static.
    """

    positions: Int[Array, "batch tokens"]
    start: Int[Array, " batch"]
    context_lengths: Int[Array, " batch"]
    tree_mask: Bool[Array, "tokens num_recent"] | None = None
    depths: Int[Array, " num_recent"] | None = None
    num_tokens: Int[Array, " batch"] | None = None
    causal: bool = static(default=True)

    @classmethod
    def bidirectional(cls, lengths: Int[Array, " batch"], count: int) -> "AttentionMask":
        """The first `count` positions; each sees all of the row's `lengths` tokens."""
        positions = jnp.arange(count, dtype=jnp.int32)[None]
        positions = jnp.broadcast_to(positions, (lengths.shape[0], count))
        return cls(positions, lengths, lengths, causal=False)

    @classmethod
    def following(
        cls, cache: KVCache, count: int, num_tokens: Int[Array, " batch"] | None = None
    ) -> "AttentionMask":
        """`count` tokens that continue each row's text, of which the first `num_tokens` are real.

        Padding stands where the last real token does, and so sees only what was written.
        """
        order = jnp.arange(count, dtype=jnp.int32)[None]
        if num_tokens is not None:
            order = jnp.minimum(order, jnp.maximum(num_tokens, 1)[:, None] - 1)
        positions = cache.lengths[:, None] + order
        return cls(positions, cache.lengths, cache.lengths, num_tokens=num_tokens)

    @classmethod
    def branching(
        cls,
        cache: KVCache,
        depths: Int[np.ndarray, " tokens"],
        tree_mask: Bool[np.ndarray, "tokens tokens"],
    ) -> "AttentionMask":
        """Tokens `depths` positions after each row's text that see each other as in `tree_mask`."""
        offsets = jnp.asarray(depths, jnp.int32)
        positions = cache.lengths[:, None] + offsets[None]
        return cls(positions, cache.lengths, cache.lengths, jnp.asarray(tree_mask), offsets)

    @property
    def end(self) -> Int[Array, " batch"]:
        """The index after the last token that any new one sees, in each row."""
        return self.start + self.positions.shape[1] if self.causal else self.context_lengths

    def seen(
        self, index: Int[Array, "rows slots"], window: int | None
    ) -> tuple[Bool[Array, "batch tokens slots"], Int[Array, "batch tokens slots"]]:
        """Whether each new token sees the token at each index, and how far behind it stands.

        `index` may have one row for all.
        """
        at, index = self.positions[:, :, None], index[:, None, :]
        if not self.causal:
            seen, position = (index >= 0) & (index < self.context_lengths[:, None, None]), index
            seen = jnp.broadcast_to(seen, (*at.shape[:2], index.shape[2]))
        elif self.tree_mask is None or self.depths is None:
            seen, position = (index >= 0) & (index <= at), index
        else:
            behind = index - self.context_lengths[:, None, None]
            recent = jnp.clip(behind, 0, self.depths.shape[0] - 1)
            # [tokens, batch, 1, slots]
            related = self.tree_mask[:, recent][:, :, 0].swapaxes(0, 1)
            inside = (behind >= 0) & (behind < self.depths.shape[0])
            seen = ((index >= 0) & (behind < 0)) | (related & inside)
            position = jnp.where(
                behind < 0, index, self.context_lengths[:, None, None] + self.depths[recent]
            )
        distance = at - position
        return (seen if window is None else seen & (distance < window)), distance
