"""What it takes a drafter to read prompts."""

import dataclasses
import math
from typing import Any, Self

from spec_jax.engine.acceptances import FADE

PRIOR_TOKENS = 256.0
"""Tokens of prompts that the time of another process counts for."""


@dataclasses.dataclass
class PromptReading:
    """The time in which the target reads prompts, and the drafter's in proportion to it.

    Attributes:
      share: the drafter's time as a part of the target's.
      seconds: in which the target read prompts; older ones count less.
      num_tokens: how many tokens it read; older ones count less.
    """

    share: float
    seconds: float = 0.0
    num_tokens: float = 0.0

    @classmethod
    def from_file(cls, share: float, number: Any) -> Self:
        """From what `for_file` returned in another process; nothing is known if it is damaged."""
        if not isinstance(number, float) or not 0 < number < math.inf:
            return cls(share)
        return cls(share, number * PRIOR_TOKENS, PRIOR_TOKENS)

    def for_file(self) -> float:
        """Seconds in which the target reads a token of a prompt; 0 before any."""
        return self.seconds / self.num_tokens if self.num_tokens else 0.0

    def add(self, num_tokens: int, seconds: float, *, drafter_too: bool) -> None:
        """Adds prompts that were read, by the drafter as well or by the target alone."""
        self.seconds = FADE * self.seconds + seconds / (1 + self.share * drafter_too)
        self.num_tokens = FADE * self.num_tokens + num_tokens

    def drafter_seconds(self, num_tokens: int) -> float:
        """In which the drafter reads so much of prompts; 0 before any time is known."""
        return num_tokens * self.share * self.for_file()
