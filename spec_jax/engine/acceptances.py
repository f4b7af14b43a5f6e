"""What finished requests tell of the drafts of later ones."""

import dataclasses
from typing import Any, Self

from spec_jax.decoding.adaptive import Adaptive

FADE = 0.8
"""The factor by which each record reduces the weight of those before it."""
RATE_CHANGE, CREDIT_CHANGE = 0.05, 4.0
"""Changes of the rate and of the credit from which on they are kept again."""


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
    def kept(cls, kept: Any, policy: Adaptive) -> Self | None:
        """What `to_keep` returned, maybe in another process; None if it is damaged."""
        if not isinstance(kept, list) or not all(isinstance(each, float) for each in kept):
            return None
        if len(kept) != 2 or not (0 <= kept[0] <= 1 and 0 <= kept[1] <= policy.max_credit):
            return None
        return cls(kept[0] * policy.prior_tokens, policy.prior_tokens, kept[1])

    def to_keep(self) -> list[float]:
        """What a later process should know: the rate and the credit."""
        return [self.rate, self.credit]

    def differs(self, kept: list[float]) -> bool:
        """Whether it has changed so much that it should be kept again."""
        return abs(self.rate - kept[0]) > RATE_CHANGE or abs(self.credit - kept[1]) > CREDIT_CHANGE

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
