"""Rotary positions of a layer, and the ways to scale them for long contexts."""

from dataclasses import dataclass

from spec_jax.errors import CheckpointError
from spec_jax.models.checks import check_positive


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3 frequency scaling of rotary embeddings (Llama 3.1, `rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071, `rope_type: yarn`).

    Attributes:
      factor: long wavelengths are stretched by it.
      original_max_position: the context before.
      fast: frequencies that turn more often than this within that context stay.
      slow: frequencies that turn less often are stretched in full.
      truncate: the range between the two is widened to integers.
      amplitude: rotated queries and keys are multiplied by it.
    """

    factor: float
    original_max_position: int
    fast: float
    slow: float
    truncate: bool
    amplitude: float


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (arXiv 2402.13753, `rope_type: longrope`): a divisor for each rotary frequency.

    The longest context that a model is used with, `max_position`, chooses between two lists of
    divisors for all positions, as in vLLM and llama.cpp. transformers chooses by the length that a
    text has so far, and computes all of it again when it grows past the original context: until
    then it agrees with a model whose context ends there, afterwards with one of a longer context.
    Keys in a cache are rotated once, so no model does both.

    Attributes:
      short: divisors in contexts of up to `original_max_position` tokens.
      long: divisors in longer ones.
      original_max_position: the context before.
      amplitude: rotated queries and keys are multiplied by it, in both.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position: int
    amplitude: float

    def divisors(self, context: int) -> tuple[float, ...]:
        """The divisors for a context of this many tokens."""
        return self.long if context > self.original_max_position else self.short


@dataclass(frozen=True)
class RotaryConfig:
    """Rotary positions of a layer.

    Attributes:
      theta: base of the frequencies.
      fraction: the leading part of each head that is rotated.
      factor: positions are divided by it before the rotation (linear scaling).
      scaling: long-context scaling of the frequencies.
    """

    theta: float = 10000.0
    fraction: float = 1.0
    factor: float = 1.0
    scaling: RopeScaling | YarnScaling | LongRopeScaling | None = None

    def __post_init__(self) -> None:
        for name in ("theta", "fraction", "factor"):
            check_positive(f"rope_{name}", getattr(self, name))
        for name, value in vars(self.scaling).items() if self.scaling else ():
            if not isinstance(value, bool | tuple):
                check_positive(f"rope_scaling.{name}", value)

    def size(self, head_dim: int) -> int:
        """Dimensions of a head that are rotated."""
        return int(head_dim * self.fraction)

    def check(self, head_dim: int) -> None:
        """Raises CheckpointError if heads of this width cannot be rotated so."""
        size = self.size(head_dim)
        if size % 2:
            raise CheckpointError(
                f"model config: {size} rotated dimensions per head; expected an even number."
            )
        if isinstance(self.scaling, LongRopeScaling):
            for name in ("short", "long"):
                divisors = getattr(self.scaling, name)
                if 2 * len(divisors) != size or not all(each > 0 for each in divisors):
                    raise CheckpointError(
                        f"model config: LongRoPE's {name} factors are {divisors!r}; expected "
                        f"{size // 2} numbers > 0."
                    )
