"""How a draft is built and trained. Imports no JAX."""

from spec_jax.config import DTYPES
from spec_jax.errors import ConfigError
from spec_jax.validation import (
    as_tuple,
    check_choice,
    check_integer,
    check_number,
    config_class,
)

OBJECTIVES = ("kl", "tv", "ce")
EMBEDDINGS = ("shared", "own")


@config_class
class TrainingConfig:
    """How a draft is built from its target, fed and trained.

    Attributes:
      layers: blocks of the draft.
      from_layers: which of the target's layers they begin as; by default as many, evenly spread
        from the first to the last.
      width: size of its residual stream; the target's by default. With another, nothing of the
        target fits, and the draft begins with random weights and an embedding of its own.
      embedding: `shared` reads and writes tokens with the target's own embedding and head, which
        are neither trained nor stored again; `own` trains copies of them.
      reduced_vocab: how many tokens, the most frequent of the data, the draft can propose; all by
        default.
      objective: `kl` distils the target's whole distribution (forward Kullback-Leibler); `tv`
        lowers the total variation distance, which is the rate of rejection at temperature 1
        (DistillSpec: Zhou et al. 2024, arXiv 2310.08461); `ce` learns the data's tokens.
      sample_tokens: tokens to sample from the target for prompts.
      temperatures: what they are sampled at; rows take turns.
      sequence_length: tokens of a row, prompt included.
      sample_batch: rows sampled at once.
      held_out: prompts kept from training, on which acceptance is measured.
      steps: updates.
      batch_size: rows of an update.
      accumulate: parts that an update's rows are read in, one after another.
      learning_rate: its peak.
      warmup_steps: updates until the peak, from which it falls to a tenth along a cosine.
      weight_decay: of AdamW, on matrices only.
      clip: largest norm of a gradient.
      dtype: of the products; weights are updated in float32.
      evaluate_every: updates between evaluations; the weights are saved at each.
      seed: of the samples, and of the order of the rows.
      max_disk: most gigabytes (10^9 bytes) that the data may take.
    """

    layers: int = 2
    from_layers: tuple[int, ...] | None = None
    width: int | None = None
    embedding: str = "shared"
    reduced_vocab: int | None = None
    objective: str = "kl"
    sample_tokens: int = 2_000_000
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    sequence_length: int = 240  # with what a round may write it fits a cache of 256 slots
    sample_batch: int = 64
    held_out: int = 32
    steps: int = 4000
    batch_size: int = 32
    accumulate: int = 1
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    weight_decay: float = 0.01
    clip: float = 1.0
    dtype: str = "float32"
    evaluate_every: int = 200
    seed: int = 0
    max_disk: float = 20.0

    def __post_init__(self) -> None:
        sizes = ("layers", "sample_tokens", "sample_batch", "held_out", "steps", "batch_size")
        for name in (*sizes, "accumulate", "evaluate_every"):
            check_integer(name, getattr(self, name), low=1)
        for name in ("width", "reduced_vocab"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), low=1)
        check_integer("sequence_length", self.sequence_length, low=8)
        check_integer("warmup_steps", self.warmup_steps, low=0)
        check_integer("seed", self.seed, low=0, high=2**32 - 1)
        check_choice("embedding", self.embedding, EMBEDDINGS)
        check_choice("objective", self.objective, OBJECTIVES)
        check_choice("dtype", self.dtype, DTYPES)
        for name in ("learning_rate", "clip", "max_disk"):
            check_number(name, getattr(self, name), low=0.0, open_low=True)
        check_number("weight_decay", self.weight_decay, low=0.0)
        temperatures = as_tuple("temperatures", self.temperatures, "temperatures")
        if not temperatures:
            raise ConfigError("temperatures is empty; give at least one.")
        for each in temperatures:
            check_number("a temperature", each, low=0.0)
        object.__setattr__(self, "temperatures", temperatures)
        self._check_layers()
        if self.batch_size % self.accumulate:
            raise ConfigError(
                f"accumulate is {self.accumulate}, which does not divide batch_size "
                f"{self.batch_size}; give a divisor of it."
            )
        if self.width is not None and self.embedding == "shared":
            raise ConfigError(
                f"width is {self.width}, but embedding is 'shared', which has the target's; use "
                "embedding 'own', or leave width out."
            )

    def _check_layers(self) -> None:
        if self.from_layers is None:
            return
        chosen = as_tuple("from_layers", self.from_layers, "layer numbers")
        object.__setattr__(self, "from_layers", chosen)
        for each in chosen:
            check_integer("a layer of from_layers", each, low=0)
        if len(chosen) != self.layers:
            raise ConfigError(
                f"from_layers names {len(chosen)} layers, but layers is {self.layers}; name one "
                "for each."
            )
        if self.width is not None:
            raise ConfigError(
                f"from_layers is {list(chosen)}, but a draft of width {self.width} cannot begin "
                "as layers of the target; leave one of the two out."
            )
