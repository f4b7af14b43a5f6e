"""What finished requests tell of later ones: acceptances of drafts and lengths of answers."""

import dataclasses
import math
from typing import Any, Self

import numpy as np

from spec_jax.decoding.adaptive import Adaptive

FADE = 0.8
"""The factor by which each record reduces the weight of those before it."""
RATE_CHANGE, CREDIT_CHANGE = 0.05, 4.0
"""Changes of the rate and of the credit from which on a file is written again."""
PRIOR_ANSWER, ANSWER_CHANGE = 256.0, 1.25
"""Tokens of an answer before any request, and the factor by which they change before a file is
written again."""


@dataclasses.dataclass
class Acceptances:
    """The statistics of an `AdaptiveState`, over the rows of finished requests of one kind.

    Attributes:
      accepted: how many drafted tokens were accepted; older ones count less.
      judged: how many drafted tokens were accepted or rejected; older ones count less.
      credit: of the last rows, see `AdaptiveState`.
      answer: tokens of an answer, on average; older ones count less.
      lost: of the last rows, see `AdaptiveState`.
      spent: of the last rows, see there.
    """

    accepted: float
    judged: float
    credit: float
    answer: float = PRIOR_ANSWER
    lost: float = 0.0
    spent: float = 0.0

    @classmethod
    def before_any(cls, policy: Adaptive) -> Self:
        """Before any request."""
        return cls(policy.prior_rate * policy.prior_tokens, policy.prior_tokens, policy.max_credit)

    @classmethod
    def from_file(cls, numbers: Any, policy: Adaptive) -> Self | None:
        """What `for_file` returned in another process; None if it is damaged or missing."""
        if not isinstance(numbers, list) or not all(isinstance(each, float) for each in numbers):
            return None
        if len(numbers) != 3:
            return None
        rate, credit, answer = numbers
        if not (0 <= rate <= 1 and 0 <= credit <= policy.max_credit and 0 < answer < math.inf):
            return None
        return cls(rate * policy.prior_tokens, policy.prior_tokens, credit, answer)

    def for_file(self) -> list[float]:
        """What a later process should know: the rate, the credit, and tokens of an answer."""
        return [self.rate, self.credit, self.answer]

    def differs(self, numbers: list[float]) -> bool:
        """Whether it has changed so much since that the file should be written again."""
        rate, credit, answer = numbers
        return (
            abs(self.rate - rate) > RATE_CHANGE
            or abs(self.credit - credit) > CREDIT_CHANGE
            or not answer <= ANSWER_CHANGE * self.answer <= ANSWER_CHANGE**2 * answer
        )

    @property
    def rate(self) -> float:
        """The acceptance rate."""
        return self.accepted / self.judged

    def add(
        self, *, accepted: float, judged: float, credit: float, lost: float, spent: float
    ) -> None:
        """Adds the means of finished rows that may draft."""
        # Not with full weight: the next text may be of another kind.
        self.accepted = FADE * self.accepted + accepted
        self.judged = FADE * self.judged + judged
        self.credit, self.lost, self.spent = credit, lost, spent

    def add_answers(self, tokens: np.ndarray, cut: np.ndarray) -> None:
        """Adds how many tokens finished rows have emitted; those cut short would have gone on."""
        tokens = np.where(cut, np.maximum(tokens, self.answer), tokens)
        self.answer = max(FADE * self.answer + (1 - FADE) * float(tokens.mean()), 1.0)
