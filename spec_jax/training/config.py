"""How a draft is built and trained. Imports no JAX."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from spec_jax.config import (
    AtLeast0,
    AtLeast1,
    Dtype,
    Flag,
    NotNegative,
    Positive,
    config_class,
    to_tuple,
)
from spec_jax.errors import ConfigError


@config_class
class TrainingConfig:
    """How a draft is built from its target, its data and its training."""

    layers: AtLeast1 = 2
    """Layers of the draft."""
    from_layers: Annotated[Sequence[AtLeast0], BeforeValidator(to_tuple)] | None = None
    """Layers of the target that initialise the draft's (default: evenly spaced). The first and the
    last are among them."""
    width: AtLeast1 | None = None
    """The draft's width, which is the size of its residual stream (default: the target's). With
    another width the target's weights do not fit, and the draft starts from random weights and its
    own embedding."""
    embedding: Literal["shared", "own"] = "shared"
    """Whose embedding and head the draft uses. `shared` reads and writes tokens with the target's
    embedding and head, which are neither trained nor stored again; `own` trains copies of them."""
    reduced_vocab: AtLeast1 | None = None
    """How many tokens the draft can propose, the most frequent of the data (default: all)."""
    sample_tokens: AtLeast1 = 2_000_000
    """Tokens to sample from the target as answers to prompts."""
    temperatures: Annotated[
        Sequence[NotNegative], Field(min_length=1), BeforeValidator(to_tuple)
    ] = (0.0, 0.7, 1.0)
    """Sampling temperatures; rows use them in turn."""
    # Together with the KV slots that a round may write, this fits 256.
    sequence_length: Annotated[AtLeast1, Field(ge=8)] = 240
    """Tokens of a row, prompt included."""
    sample_batch: AtLeast1 = 64
    """Rows sampled at once."""
    held_out: AtLeast1 = 32
    """Prompts kept from training, on which acceptance is measured."""
    max_disk: Annotated[Positive, Flag(metavar="GB")] = 20.0
    """Most gigabytes (10^9 bytes) that the data may take."""
    objective: Literal["kl", "tv", "ce"] = "kl"
    """The loss to minimise. `kl` distils the target's whole distribution (forward
    Kullback-Leibler); `tv` minimises the total variation distance, which is the rejection rate at
    temperature 1 (DistillSpec: Zhou et al. 2024, arXiv 2310.08461); `ce` learns the tokens of the
    data."""
    steps: AtLeast1 = 4000
    """Updates."""
    batch_size: AtLeast1 = 32
    """Rows of an update."""
    accumulate: AtLeast1 = 1
    """Micro-batches of an update, read one after another."""
    learning_rate: Positive = 1e-3
    """The peak learning rate."""
    warmup_steps: AtLeast0 = 100
    """Updates until the peak; after it the rate decays to a tenth along a cosine."""
    weight_decay: NotNegative = 0.01
    """Weight decay of AdamW, on matrices only."""
    clip: Positive = 1.0
    """Largest norm of a gradient."""
    dtype: Dtype = "float32"
    """Dtype of the products; weights are updated in float32."""
    evaluate_every: AtLeast1 = 200
    """Updates between evaluations; the weights are saved at each."""
    seed: Annotated[AtLeast0, Field(le=2**32 - 1)] = 0
    """Seed of the samples, and of the order of the rows."""

    def __post_init__(self) -> None:
        layers = self.from_layers
        if layers is not None and len(layers) != self.layers:
            raise ConfigError(
                f"from_layers names {len(layers)} layers, but layers is {self.layers}; name one "
                "for each."
            )
        if layers is not None and self.width is not None:
            raise ConfigError(
                f"from_layers is {list(layers)}, but layers of the target cannot initialise a "
                f"draft of width {self.width}; leave one of the two out."
            )
        if self.batch_size % self.accumulate:
            raise ConfigError(
                f"accumulate is {self.accumulate}, which does not divide batch_size "
                f"{self.batch_size}; give a divisor of it."
            )
        if self.width is not None and self.embedding == "shared":
            raise ConfigError(
                f"width is {self.width}, but embedding 'shared' has the target's width; use "
                "embedding 'own', or leave width out."
            )
