"""A drafter on the seam for features: one random layer of attention, as the heads of EAGLE are."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from spec_jax.drafters import (
    Committed,
    Context,
    Draft,
    Drafter,
    DrafterPrompt,
    PromptBlock,
    autoregress,
    pytree,
    static,
)

SIZE = 8


@pytree
class Pairs:
    """What the layer has seen: pairs of a token's features and the token after it.

    Attributes:
      keys: of each pair.
      values: of each pair.
      lengths: pairs of each row.
      last: the layer's input at the last pair.
    """

    keys: Float[Array, "batch length size"]
    values: Float[Array, "batch length size"]
    lengths: Int[Array, " batch"]
    last: Float[Array, "batch size"]


@pytree
class FeatureDrafter(Drafter):
    """Reads the target's features of each kept token; continues with its own output.

    Attributes:
      weights: `mix` of features, `embed` of tokens, `qkv`, and the `head`.
      lookahead: K.
      feature_layers: which features it reads.
    """

    weights: dict[str, Array]
    lookahead: int = static()
    feature_layers: tuple[int, ...] = static()
    fixed_length = True

    @classmethod
    def random(cls, target, lookahead, feature_layers=None):
        """Random weights for a target; by default it reads the features of every layer."""
        config = target.config
        layers = feature_layers or tuple(range(config.num_layers + 1))
        shapes = {
            "mix": (len(layers) * config.embed_size, SIZE),
            "embed": (config.vocab_size, SIZE),
            "qkv": (SIZE, 3 * SIZE),
            "head": (SIZE, config.vocab_size),
        }
        draws = np.random.default_rng(5)
        weights = {
            name: 2 * draws.standard_normal(shape, np.float32) / np.sqrt(shape[0] or 1)
            for name, shape in shapes.items()
        }
        weights["embed"] *= np.sqrt(config.vocab_size)
        put = jax.tree.map(lambda each: target.replicated(np.asarray(each, np.float32)), weights)
        return cls(put, lookahead, layers)

    def init(self, prompt: DrafterPrompt) -> Pairs:
        batch, length = prompt.tokens.shape
        keys, values = (jnp.zeros((batch, length, SIZE), jnp.float32) for _ in range(2))
        return Pairs(keys, values, jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, SIZE)))

    def prefill(self, state: Pairs, block: PromptBlock) -> Pairs:
        return self._read(state, block.tokens, block.begin, block.num_tokens, block.features)

    def copy_prefix(self, state: Pairs, other: Pairs, num_tokens: Array) -> Pairs:
        return Pairs(other.keys, other.values, num_tokens, state.last)

    def commit(self, state: Pairs, committed: Committed) -> Pairs:
        begin, num_tokens = committed.before - 1, committed.lengths - committed.before
        return self._read(state, committed.tokens, begin, num_tokens, committed.features)

    def _read(self, state, tokens, begin, num_tokens, features):
        """Adds pairs that begin at the row's next one; `num_tokens` of them count."""
        order = jnp.arange(features.shape[1], dtype=jnp.int32)[None]
        after = jnp.minimum(begin[:, None] + order + 1, tokens.shape[1] - 1)
        flat = features.reshape(*features.shape[:2], -1).astype(jnp.float32)
        x = self._input(
            jnp.tanh(flat @ self.weights["mix"]), jnp.take_along_axis(tokens, after, axis=1)
        )
        valid = order < num_tokens[:, None]
        places = jnp.where(valid, begin[:, None] + order, tokens.shape[1])
        keys, values = self._write(state.keys, state.values, x, places)
        at = jnp.maximum(num_tokens - 1, 0)[:, None, None]
        last = jnp.where(
            (num_tokens > 0)[:, None], jnp.take_along_axis(x, at, axis=1)[:, 0], state.last
        )
        return Pairs(keys, values, state.lengths + num_tokens, last)

    def _input(self, hidden, tokens):
        return hidden + self.weights["embed"][tokens]

    def _write(self, keys, values, x, places):
        _, k, v = jnp.split(x @ self.weights["qkv"], 3, axis=-1)
        write = jax.vmap(lambda row, new, at: row.at[at].set(new, mode="drop"))
        return write(keys, k, places), write(values, v, places)

    def _attend(self, keys, values, x, lengths):
        q = jnp.split(x @ self.weights["qkv"], 3, axis=-1)[0]
        seen = jnp.arange(keys.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
        scores = jnp.where(seen, jnp.einsum("bd,bld->bl", q, keys), -1e9)
        weights = jnp.where(seen, jax.nn.softmax(scores, -1), 0.0)
        return jnp.tanh(x + jnp.einsum("bl,bld->bd", weights, values))

    def propose(self, state: Pairs, context: Context) -> tuple[Draft, Pairs]:
        def step(carry, i, drawn):
            keys, values, hidden = carry
            if isinstance(i, int):
                x = state.last
            else:
                x = self._input(hidden, drawn[:, 0])
                place = (state.lengths + i - 1)[:, None]
                keys, values = self._write(keys, values, x[:, None], place)
            hidden = self._attend(keys, values, x, state.lengths + i)
            return (hidden @ self.weights["head"])[:, None], (keys, values, hidden)

        carry = (state.keys, state.values, state.last)
        draft, _ = autoregress(step, carry, context, lookahead=self.lookahead)
        return draft, state
