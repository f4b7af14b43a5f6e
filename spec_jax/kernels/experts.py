"""Products with the experts of sparse MLPs: each row meets its expert's matrix.

Rows are sorted by expert and cut into tiles of one expert's rows; a loop runs over the tiles and
takes the matrix of each tile out of the stack. `jax.lax.ragged_dot` does the same on TPU alone:
elsewhere it multiplies all rows with all experts (jax 0.10.2).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax.kernels import native_calls
from spec_jax.kernels.packed_weight import PackedWeight
from spec_jax.kernels.products import Weight, products
from spec_jax.pytree import pytree

MIN_TILE, MAX_TILE = 8, 128
"""Rows of a tile, if this many can choose the same expert."""


@pytree
class Tiles:
    """Rows in tiles, each of rows of one expert.

    Attributes:
      experts: the expert of each tile.
      rows: the rows of each tile; an expert's last tile is filled up with any row.
      used: how many tiles hold rows; they come first.
      places: the index of each row among the tiles' rows, one tile after another.
      held: whether the stacks hold the row's expert.
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
          chosen: each row's expert; an expert outside [0, `here`) is on another device.
          here: experts of the stacks (static).
          count: experts of the model (static): a tile has about as many rows as an expert on
            average.
          tokens: how many rows at most can choose the same expert (static).
        """
        rows = chosen.shape[0]
        size = min(tokens, max(MIN_TILE, min(MAX_TILE, _next_power(rows // count))))
        # Each chosen expert has at most one tile that is partly filled.
        num_partial = min(here, rows)
        tiles = min(num_partial + (rows - num_partial) // size, here * -(-tokens // size))
        chose = (chosen[:, None] == jnp.arange(here)[None]).astype(jnp.int32)
        held, expert = chose.any(1), jnp.clip(chosen, 0, here - 1)
        ranks = ((jnp.cumsum(chose, 0) - chose) * chose).sum(1)
        of_expert = -(-chose.sum(0) // size)
        ends = jnp.cumsum(of_expert)
        places = (ends - of_expert)[expert] * size + ranks
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

        outputs = jax.lax.map(tile, (jnp.arange(len(self.rows)), self.experts, self.rows))
        return [
            jnp.where(self.held[:, None], each.reshape(-1, each.shape[-1])[self.places], 0.0)
            for each in outputs
        ]


def expert_products(
    x: Float[Array, "rows in"], chosen: Int[Array, " rows"], stacks: Sequence[Weight]
) -> list[Float[Array, "rows _"]]:
    """Each row times its expert's matrix of each packed stack; one native call a format."""
    packed = [stack for stack in stacks if isinstance(stack, PackedWeight)]
    assert len(packed) == len(stacks), "native code multiplies all matrices of a model or none"
    if len({stack.signature for stack in packed}) > 1:
        return [expert_products(x, chosen, [stack])[0] for stack in packed]
    return native_calls.expert_products(x.astype(jnp.float32), chosen, packed)


def take_expert(stack: Weight, expert: Int[Array, ""]) -> Weight:
    """One matrix of a stack."""
    return jax.tree.map(
        lambda part: jax.lax.dynamic_index_in_dim(part, expert, keepdims=False), stack
    )


def _next_power(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
