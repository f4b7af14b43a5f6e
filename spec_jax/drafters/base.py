"""The protocol every drafter follows: two pure functions around one explicit state."""

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int, Key

from spec_jax.decoding.sampling import BatchSampling
from spec_jax.pytree import pytree


@pytree
class Context:
    """What a drafter may see of the rows it drafts for.

    Attributes:
      tokens: prompt and output; only the first `lengths` of each row mean anything.
      lengths: tokens known of each row.
      prompt_lengths: how many of them are the prompt's.
      keys: randomness of this round's draft.
      sampling: the parameters the request is sampled with; drafts use the same.
    """

    tokens: Int[Array, "batch length"]
    lengths: Int[Array, " batch"]
    prompt_lengths: Int[Array, " batch"]
    keys: Key[Array, " batch"]
    sampling: BatchSampling


@pytree
class Draft:
    """Proposed continuations.

    Attributes:
      tokens: the proposals; those at or past `lengths` mean nothing.
      probs: q, exactly the distribution each token was drawn from, or None if the drafter is
        deterministic and q is one-hot.
      lengths: how many tokens each row proposes.
    """

    tokens: Int[Array, "batch lookahead"]
    probs: Float[Array, "batch lookahead vocab"] | None
    lengths: Int[Array, " batch"]


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens. A drafter is a pytree: its weights travel as arguments of the loop."""

    @property
    def lookahead(self) -> int:
        """Most tokens it proposes per round (K); static."""
        ...

    def init(
        self, tokens: Int[Array, "batch length"], lengths: Int[Array, " batch"], block: int
    ) -> Any:
        """The state after the prompts; `block` is the width that prompts are read in."""
        ...

    def propose(self, state: Any, context: Context) -> tuple[Draft, Any]:
        """Up to K tokens for each row."""
        ...

    def commit(self, state: Any, lengths: Int[Array, " batch"]) -> Any:
        """Accepts that the rows now hold `lengths` tokens; rolls back whatever was refused."""
        ...
