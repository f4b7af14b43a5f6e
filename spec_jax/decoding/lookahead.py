"""Lookahead policies: how many tokens each row may draft in the next round."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Int


@runtime_checkable
class Lookahead(Protocol):
    """Two pure functions around an explicit state; static under jit."""

    def init(self, batch: int) -> Any:
        """The state before the first round."""
        ...

    def limits(self, state: Any, batch: int) -> Int[Array, " batch"]:
        """Most tokens that each row may draft now."""
        ...

    def update(
        self, state: Any, drafted: Int[Array, " batch"], accepted: Int[Array, " batch"]
    ) -> Any:
        """The state after a round."""
        ...


@dataclasses.dataclass(frozen=True)
class Constant:
    """The same K in every round."""

    num_speculative_tokens: int

    def init(self, batch: int) -> None:
        """No state."""

    def limits(self, state: None, batch: int) -> Int[Array, " batch"]:
        """K for every row."""
        return jnp.full((batch,), self.num_speculative_tokens, jnp.int32)

    def update(self, state: None, drafted: Array, accepted: Array) -> None:
        """No state."""
