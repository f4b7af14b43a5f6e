"""What finished requests tell of the drafts of later ones."""

import dataclasses
from typing import Any, Self

from spec_jax.decoding.adaptive import Adaptive

FADE = 0.8
"""The factor by which each record reduces the weight of those before it."""
RATE_CHANGE, CREDIT_CHANGE = 0.05, 4.0
"""Changes of the rate and of the credit from which on a file is written again."""


@dataclasses.dataclass
class Acceptances:
    """The statistics of an `AdaptiveState`, over the rows of finished requests of one kind.

    Attributes:
      accepted: how many drafted tokens were accepted; older ones count less.
      judged: how many drafted tokens were accepted or rejected; older ones count less.
      credit: of the last rows, see `AdaptiveState`.
      lost: of the last rows, see there.
      spent: of the last rows, see there.
    """

    accepted: float
    judged: float
    credit: float
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
        if len(numbers) != 2:
            return None
        rate, credit = numbers
        if not (0 <= rate <= 1 and 0 <= credit <= policy.max_credit):
            return None
        return cls(rate * policy.prior_tokens, policy.prior_tokens, credit)

    def for_file(self) -> list[float]:
        """What a later process should know: the rate and the credit."""
        return [self.rate, self.credit]

    def differs(self, numbers: list[float]) -> bool:
        """Whether it has changed so much since that the file should be written again."""
        rate, credit = numbers
        return abs(self.rate - rate) > RATE_CHANGE or abs(self.credit - credit) > CREDIT_CHANGE

    @property
    def rate(self) -> float:
        """The acceptance rate."""
        return self.accepted / self.judged

    def add(
        self, *, accepted: float, judged: float, credit: float, lost: float, spent: float
    ) -> None:
        """Adds the means of finished rows."""
        # Not with full weight: the next text may be of another kind.
        self.accepted = FADE * self.accepted + accepted
        self.judged = FADE * self.judged + judged
        self.credit, self.lost, self.spent = credit, lost, spent
