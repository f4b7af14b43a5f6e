"""The kinds of layers: each mixes tokens in its way and has a state of its kind."""

from typing import Any, ClassVar, Protocol

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from spec_jax.errors import ConfigError
from spec_jax.models.cache import KVCache, LayerState, StateSize
from spec_jax.models.config import LayerConfig, TransformerConfig
from spec_jax.models.context import LayerContext
from spec_jax.models.self_attention import Attention


class Mixer(Protocol):
    """The part of a layer that mixes tokens: an NNX module over a `LayerState`.

    Attributes:
      reads_trees: whether tokens may be branches of a tree, see `AttentionMask.tree_mask`, instead
        of following one another.
    """

    reads_trees: ClassVar[bool]

    def __init__(
        self,
        config: TransformerConfig,
        layer: LayerConfig,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None: ...

    @staticmethod
    def new_state(config: TransformerConfig, layer: LayerConfig, size: StateSize) -> LayerState:
        """The state of rows without tokens."""
        ...

    def __call__(
        self, x: Float[Array, "batch tokens embed"], state: Any, context: LayerContext
    ) -> tuple[Float[Array, "batch tokens embed"], Any]:
        """The output for the tokens of a call, and the state with them written."""
        ...


MIXERS: dict[str, type[Mixer]] = {"attention": Attention}
"""By `LayerConfig.kind`."""


def new_cache(config: TransformerConfig, size: StateSize) -> KVCache:
    """The states of rows without tokens."""
    return KVCache(
        layers=tuple(MIXERS[layer.kind].new_state(config, layer, size) for layer in config.layers),
        lengths=size.placement.pin(jnp.zeros((size.batch,), jnp.int32), "batch"),
    )


def check_trees(config: TransformerConfig) -> None:
    """Raises ConfigError if a layer cannot read trees of drafts."""
    for layer in config.kinds:
        if not MIXERS[layer.kind].reads_trees:
            raise ConfigError(
                f"Layers of the kind {layer.kind!r} read tokens one after another, not several "
                "drafts side by side. Use one draft (num_drafts=1) and scoring='block'."
            )
