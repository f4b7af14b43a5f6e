"""Products with the experts of sparse MLPs: each row meets the matrix of its own expert.

Rows are sorted by expert and cut into tiles of one expert's rows; a loop runs over the tiles and
takes each one's matrix out of the stack. `jax.lax.ragged_dot` does the same on TPU alone: elsewhere
it multiplies all rows with all experts (jax 0.10.2).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax.kernels import native
from spec_jax.kernels.products import Weight, products
from spec_jax.kernels.weights import PackedWeight
from spec_jax.pytree import pytree

LEAST_TILE, LARGEST_TILE = 8, 128
"""Rows of a tile, if so many can choose the same expert."""


@pytree
class Tiles:
    """Rows in tiles, each of rows of one expert.

    Attributes:
      experts: the expert of each tile.
      rows: the rows of each tile; what does not fill the last tile of an expert is any row.
      used: tiles that hold rows, the first ones.
      places: where each row stands when the tiles' rows are put one after another.
      held: whether the row's expert is among these at all.
    """

    experts: Int[Array, " tiles"]
    rows: Int[Array, "tiles size"]
    used: Int[Array, ""]
    places: Int[Array, " rows"]
    held: Bool[Array, " rows"]

    @classmethod
    def of(cls, chosen: Int[Array, " rows"], *, here: int, count: int, tokens: int) -> "Tiles":
        """Sorts rows by their experts.

        Args:
          chosen: each row's expert; those outside [0, `here`) are another device's.
          here: experts of the stacks (static).
          count: experts in all (static): a tile has about as many rows as an expert on average.
          tokens: most rows that can choose the same expert (static).
        """
        rows = chosen.shape[0]
        size = min(tokens, max(LEAST_TILE, min(LARGEST_TILE, _next_power(rows // count))))
        # Each expert that is chosen has one tile that may be partly filled.
        most = min(here, rows)
        tiles = min(most + (rows - most) // size, here * -(-tokens // size))
        chose = (chosen[:, None] == jnp.arange(here)[None]).astype(jnp.int32)
        held, own = chose.any(1), jnp.clip(chosen, 0, here - 1)
        ranks = ((jnp.cumsum(chose, 0) - chose) * chose).sum(1)
        of_expert = -(-chose.sum(0) // size)
        ends = jnp.cumsum(of_expert)
        places = (ends - of_expert)[own] * size + ranks
        sources = jnp.zeros((tiles * size,), jnp.int32)
        sources = sources.at[jnp.where(held, places, tiles * size)].set(
            jnp.arange(rows, dtype=jnp.int32), mode="drop"
        )
        # Tiles that are not used name the last expert.
        numbers = jnp.arange(tiles, dtype=jnp.int32)
        experts = jnp.minimum((ends[None] <= numbers[:, None]).sum(1), here - 1)
        return cls(
            experts=experts.astype(jnp.int32),
            rows=sources.reshape(tiles, size),
            used=ends[-1],
            places=jnp.where(held, places, 0),
            held=held,
        )

    def products(
        self, x: Float[Array, "rows in"], stacks: Sequence[Weight], *, skip: bool
    ) -> list[Float[Array, "rows _"]]:
        """Each row times its expert's matrix of each stack; 0 if the expert is not held.

        Args:
          x: the rows.
          stacks: plain or quantized matrices of the experts, [experts, in, out].
          skip: whether to skip tiles that are not used (static).
        """

        def run(expert: Array, rows: Array) -> list[Array]:
            return products(x[rows], [take_expert(stack, expert) for stack in stacks])

        def nothing(expert: Array, rows: Array) -> list[Array]:
            shapes = jax.eval_shape(run, expert, rows)
            return [jnp.zeros(each.shape, each.dtype) for each in shapes]

        def tile(each: tuple[Array, Array, Array]) -> list[Array]:
            number, expert, rows = each
            if not skip:
                return run(expert, rows)
            return jax.lax.cond(number < self.used, run, nothing, expert, rows)

        found = jax.lax.map(tile, (jnp.arange(len(self.rows)), self.experts, self.rows))
        return [
            jnp.where(self.held[:, None], each.reshape(-1, each.shape[-1])[self.places], 0.0)
            for each in found
        ]


def expert_products(
    x: Float[Array, "rows in"], chosen: Int[Array, " rows"], stacks: Sequence[Weight]
) -> list[Float[Array, "rows _"]]:
    """Each row times its expert's matrix of each packed stack; those of one format in one call."""
    packed = [stack for stack in stacks if isinstance(stack, PackedWeight)]
    assert len(packed) == len(stacks), "native code multiplies all matrices of a model or none"
    if len({stack.signature for stack in packed}) > 1:
        return [expert_products(x, chosen, [stack])[0] for stack in packed]
    return native.expert_products(x.astype(jnp.float32), chosen, packed)


def take_expert(stack: Weight, expert: Int[Array, ""]) -> Weight:
    """One matrix of a stack."""
    return jax.tree.map(
        lambda part: jax.lax.dynamic_index_in_dim(part, expert, keepdims=False), stack
    )


def _next_power(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
