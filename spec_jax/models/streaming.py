"""Blocks whose matrices lie in host memory: they pass through two buffers on the device.

While a block computes, the matrices of the next one are copied into the buffer that the block
before has left. A call takes as long as its copies or its products, whichever is longer, and the
device holds two such blocks at a time, however many there are. Of a block with sparse experts all
are copied.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool

from spec_jax.control import in_place_if

T = TypeVar("T")
Buffer = dict[int, Array]
"""A block's matrices in device memory, by their place among its weights."""


def is_streamed(blocks: Sequence[nnx.Module]) -> bool:
    """Whether any of the blocks has matrices in host memory."""
    return any(_on_host(leaf) for block in blocks for leaf in jax.tree.leaves(nnx.state(block)))


def run_streamed(
    blocks: Sequence[nnx.Module],
    x: Array,
    carries: Sequence[T],
    run: Callable[[int, Any, Any, Array, T], tuple[Array, T]],
    true: Bool[Array, ""],
) -> tuple[list[Array], list[T]]:
    """Runs blocks one after another: `x, carries[i] = run(i, graphdef, weights, x, carries[i])`.

    Args:
      blocks: the matrices of all or some of them lie in host memory.
      x: the first block's input.
      carries: the cache of each block, which it updates in place.
      run: runs a block; `nnx.merge(graphdef, weights)` is the block.
      true: a scalar that is true at run time, which the compiler must not be able to tell.

    Returns:
      The input of the first block and the output of each, and the updated carries.
    """
    stored, after = [_Stored.of(block) for block in blocks], list(carries)
    stream = [x]
    streamed = [i for i, each in enumerate(stored) if each.matrices]
    buffers = {i: stored[i].fetch() for i in streamed[:2]}
    order = dict(zip(streamed[1:-1], zip(streamed, streamed[2:], strict=False), strict=True))
    for i, each in enumerate(stored):
        block = functools.partial(run, i, each.graphdef, each.with_matrices(buffers.get(i, {})))
        if i not in order:
            x, after[i] = block(x, after[i])
            stream.append(x)
            continue
        last, following = order[i]

        def step(carry: tuple[Array, T, Buffer], block=block, following=following):
            # Neither depends on the other, so that the compiler lets them overlap.
            return *block(*carry[:2]), stored[following].fetch()

        # Without loops, which no copy leaves, XLA starts as many copies at once as memory allows.
        spare = stored[following].buffer(buffers.pop(last))
        x, after[i], buffers[following] = in_place_if(true, step, (x, after[i], spare))
        stream.append(x)
    return stream, after


def resident(weights: Any) -> Any:
    """A tree of weights, all of them in device memory."""
    return jax.tree.map(lambda leaf: _copy(leaf) if _on_host(leaf) else leaf, weights)


@dataclass(frozen=True)
class _Stored:
    """A block's weights where they are stored; `matrices` lie in host memory."""

    graphdef: Any
    treedef: Any
    leaves: list[Array]
    matrices: Buffer

    @classmethod
    def of(cls, block: nnx.Module) -> "_Stored":
        graphdef, state = nnx.split(block)
        leaves, treedef = jax.tree.flatten(state)
        matrices = {k: leaf for k, leaf in enumerate(leaves) if _on_host(leaf)}
        return cls(graphdef, treedef, leaves, matrices)

    def fetch(self) -> Buffer:
        """Copies of the matrices in device memory."""
        return {k: _copy(matrix) for k, matrix in self.matrices.items()}

    def buffer(self, left: Buffer) -> Buffer:
        """The buffer that `fetch` writes to: the one that another block has left, where it fits."""

        def like(k: int, matrix: Array) -> Array:
            if k in left and (left[k].shape, left[k].dtype) == (matrix.shape, matrix.dtype):
                return left[k]
            return jnp.empty(matrix.shape, matrix.dtype)

        return {k: like(k, matrix) for k, matrix in self.matrices.items()}

    def with_matrices(self, buffer: Buffer) -> Any:
        """The block's weights, with these copies of its matrices."""
        leaves = [buffer.get(k, leaf) for k, leaf in enumerate(self.leaves)]
        return jax.tree.unflatten(self.treedef, leaves)


def _on_host(leaf: Array) -> bool:
    return jax.typeof(leaf).memory_space == jax.memory.Space.Host


def _copy(matrix: Array) -> Array:
    return jax.device_put(matrix, jax.memory.Space.Device)
