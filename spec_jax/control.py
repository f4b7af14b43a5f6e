"""Control flow of programs: branches around large buffers.

`lax.cond` and `lax.switch` copy what their branches return. A loop that runs once or not at all
updates its carry in place, as any loop does.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

T = TypeVar("T")


def in_place_if(go: Bool[Array, ""], function: Callable[[T], T], carry: T) -> T:
    """`function(carry)` if `go`, else `carry`; neither is copied."""

    def once(state: tuple[Array, T]) -> tuple[Array, T]:
        return jnp.zeros((), bool), function(state[1])

    return jax.lax.while_loop(lambda state: state[0], once, (go, carry))[1]


def at_width(
    widths: Sequence[int],
    min_width: Int[Array, ""],
    function: Callable[[int, T], T],
    carry: T,
) -> T:
    """`function(width, carry)` for the smallest of the widths that is not below `min_width`.

    Args:
      widths: ascending, static; each is compiled.
      min_width: at most the last width.
      function: given the width as a Python number.
      carry: the value that the function updates, in place.
    """
    if len(widths) == 1:
        return function(widths[0], carry)
    index = sum(
        ((min_width > width).astype(jnp.int32) for width in widths[:-1]), start=jnp.int32(0)
    )
    for i, width in enumerate(widths):
        carry = in_place_if(index == i, lambda state, width=width: function(width, state), carry)
    return carry
