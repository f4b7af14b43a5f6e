"""How a draft is built and trained. Imports no JAX."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import BeforeValidator, Field

from spec_jax.config import (
    DTYPES,
    AtLeast0,
    AtLeast1,
    NotNegative,
    Positive,
    config_class,
    one_of,
    to_tuple,
)
from spec_jax.errors import ConfigError

OBJECTIVES = ("kl", "tv", "ce")
EMBEDDINGS = ("shared", "own")


@config_class
class TrainingConfig:
    """How a draft is built from its target, its data and its training.

    Attributes:
      layers: layers of the draft.
      from_layers: the target's layers that initialise them; by default evenly spaced from the first
        to the last.
      width: size of its residual stream; the target's by default. With another width the target's
        weights do not fit, and the draft starts from random weights and its own embedding.
      embedding: `shared` reads and writes tokens with the target's own embedding and head, which
        are neither trained nor stored again; `own` trains copies of them.
      reduced_vocab: how many tokens, the most frequent of the data, the draft can propose; all by
        default.
      objective: `kl` distils the target's whole distribution (forward Kullback-Leibler); `tv`
        minimises the total variation distance, which is the rejection rate at temperature 1
        (DistillSpec: Zhou et al. 2024, arXiv 2310.08461); `ce` learns the tokens of the data.
      sample_tokens: tokens to sample from the target as answers to prompts.
      temperatures: the sampling temperatures; rows use them in turn.
      sequence_length: tokens of a row, prompt included.
      sample_batch: rows sampled at once.
      held_out: prompts kept from training, on which acceptance is measured.
      steps: updates.
      batch_size: rows per update.
      accumulate: micro-batches per update, read one after another.
      learning_rate: the peak learning rate.
      warmup_steps: updates until the peak; after it the rate decays to a tenth along a cosine.
      weight_decay: of AdamW, on matrices only.
      clip: largest norm of a gradient.
      dtype: of the products; weights are updated in float32.
      evaluate_every: updates between evaluations; the weights are saved at each.
      seed: of the samples, and of the order of the rows.
      max_disk: most gigabytes (10^9 bytes) that the data may take.
    """

    layers: AtLeast1 = 2
    from_layers: Annotated[Sequence[AtLeast0], BeforeValidator(to_tuple)] | None = None
    width: AtLeast1 | None = None
    embedding: Annotated[str, one_of(EMBEDDINGS)] = "shared"
    reduced_vocab: AtLeast1 | None = None
    objective: Annotated[str, one_of(OBJECTIVES)] = "kl"
    sample_tokens: AtLeast1 = 2_000_000
    temperatures: Annotated[
        Sequence[NotNegative], Field(min_length=1), BeforeValidator(to_tuple)
    ] = (0.0, 0.7, 1.0)
    # Together with the KV slots that a round may write, this fits 256.
    sequence_length: Annotated[AtLeast1, Field(ge=8)] = 240
    sample_batch: AtLeast1 = 64
    held_out: AtLeast1 = 32
    steps: AtLeast1 = 4000
    batch_size: AtLeast1 = 32
    accumulate: AtLeast1 = 1
    learning_rate: Positive = 1e-3
    warmup_steps: AtLeast0 = 100
    weight_decay: NotNegative = 0.01
    clip: Positive = 1.0
    dtype: Annotated[str, one_of(DTYPES)] = "float32"
    evaluate_every: AtLeast1 = 200
    seed: Annotated[AtLeast0, Field(le=2**32 - 1)] = 0
    max_disk: Positive = 20.0

    def __post_init__(self) -> None:
        self._check_layers()
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

    def _check_layers(self) -> None:
        if self.from_layers is None:
            return
        chosen = self.from_layers
        if len(chosen) != self.layers:
            raise ConfigError(
                f"from_layers names {len(chosen)} layers, but layers is {self.layers}; name one "
                "for each."
            )
        if self.width is not None:
            raise ConfigError(
                f"from_layers is {list(chosen)}, but layers of the target cannot initialise a "
                f"draft of width {self.width}; leave one of the two out."
            )
