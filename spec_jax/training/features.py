"""Recording the target's features while it decodes."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spec_jax.decoding.rows import write_rows
from spec_jax.drafters.base import Committed, Context, Draft, Drafter, DrafterPrompt, PromptBlock
from spec_jax.drafters.none import NoDraft
from spec_jax.models.model import Model
from spec_jax.pytree import pytree, static

Features = Float[Array, "batch length embed"]


@pytree
class FeatureRecorder(Drafter):
    """Drafts nothing, and keeps the target's last features at every token but a row's last.

    Attributes:
      target: the target.
      feature_layers: the layer whose features are kept.
      lookahead: tokens of padding that a round scores, as in `NoDraft`.
    """

    target: Model
    feature_layers: tuple[int, ...] = static()
    lookahead: int = static(default=0)
    fixed_length = True

    @classmethod
    def of(cls, target: Model) -> "FeatureRecorder":
        """The recorder of a target's input of the final norm."""
        return cls(target, (target.config.num_layers,))

    def init(self, prompt: DrafterPrompt) -> Features:
        """Room for every token."""
        return self.target.new_states(*prompt.tokens.shape)

    def prefill(self, state: Features, block: PromptBlock) -> Features:
        """Adds the features of a block."""
        assert block.features is not None
        order = jnp.arange(block.size, dtype=jnp.int32)[None]
        places = block.begin[:, None] + order
        places = jnp.where(order < block.num_tokens[:, None], places, state.shape[1])
        write = jax.vmap(lambda row, new, at: row.at[at].set(new, mode="drop"))
        return write(state, block.features[:, :, 0].astype(state.dtype), places)

    def propose(self, state: Features, context: Context) -> tuple[Draft, Features]:
        """An empty draft."""
        return NoDraft(self.lookahead).propose(None, context)[0], state

    def commit(self, state: Features, committed: Committed) -> Features:
        """Adds the features of a round; only kept tokens count."""
        assert committed.features is not None
        features = committed.features[:, :, 0].astype(state.dtype)
        return write_rows(state, features, committed.before - 1)
