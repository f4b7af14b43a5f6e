"""Layers whose state is not rolled back by a length: a short convolution and a gated delta rule.

They are written as a user of the package would add them: a mixer, its state, and a row of `MIXERS`.
"""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from spec_jax.models.cache import StateSize
from spec_jax.models.config import LayerConfig, TransformerConfig
from spec_jax.models.context import LayerContext
from spec_jax.models.layers import Linear, project
from spec_jax.models.mixers import MIXERS
from spec_jax.pytree import pytree, static


def _write(buffer: Array, new: Array, at: Array, num_tokens: Array | None) -> Array:
    """The buffer [batch, slots, ...] with the first `num_tokens` new tokens at slots `at`."""
    slots = buffer.shape[1]
    order = jnp.arange(new.shape[1], dtype=jnp.int32)[None]
    real = (at >= 0) & (at < slots)
    if num_tokens is not None:
        real = real & (order < num_tokens[:, None])
    at = jnp.where(real, at, slots + order)
    return jax.vmap(lambda row, new, at: row.at[at].set(new, mode="drop"))(buffer, new, at)


@dataclass(frozen=True)
class ConvolutionConfig(LayerConfig):
    """A convolution over the last `kernel` tokens, gated before and after (LFM2)."""

    kind: str = "short_convolution"
    kernel: int = 3


@pytree
class Columns:
    """The latest columns that a convolution read: column i is in slot i modulo the slots.

    With `kernel - 1 + headroom` slots no column that a token still needs is overwritten.
    """

    columns: Float[Array, "batch slots embed"]
    is_full: bool = static()

    @property
    def can_truncate(self) -> bool:
        return self.is_full

    def commit(self, lengths: Int[Array, " batch"]) -> Self:
        return self

    def gather(self, sources, to, num_tokens=None) -> Self:
        raise NotImplementedError("a convolution reads no trees")

    def write(
        self, new: Float[Array, "batch tokens embed"], start: Array, num_tokens: Array | None
    ) -> Self:
        at = (
            start[:, None] + jnp.arange(new.shape[1], dtype=jnp.int32)[None]
        ) % self.columns.shape[1]
        return dataclasses.replace(self, columns=_write(self.columns, new, at, num_tokens))

    def before(self, start: Array, tokens: int, back: int) -> Float[Array, "batch tokens embed"]:
        """The column `back` tokens before each token of a call; zero before the text."""
        at = start[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None] - back
        slots = (at % self.columns.shape[1])[..., None]
        columns = jnp.take_along_axis(self.columns, slots, axis=1)
        return jnp.where(at[..., None] >= 0, columns, 0.0)


class ShortConvolution(nnx.Module):
    """`output(after * convolution(before * x))` with a filter for each channel."""

    reads_trees: ClassVar[bool] = False

    def __init__(
        self, config: TransformerConfig, layer: LayerConfig, *, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        assert isinstance(layer, ConvolutionConfig)
        size = config.embed_size

        def linear() -> Linear:
            axes = ("embed", "mlp")
            return Linear(size, size, axes=axes, bias=False, dtype=dtype, rngs=rngs)

        self.x, self.before, self.after, self.output = linear(), linear(), linear(), linear()
        self.filter = nnx.Param(jax.random.normal(rngs.params(), (layer.kernel, size)))

    @staticmethod
    def new_state(config: TransformerConfig, layer: LayerConfig, size: StateSize) -> Columns:
        assert isinstance(layer, ConvolutionConfig)
        slots = size.capacity
        if size.headroom is not None:
            slots = min(slots, layer.kernel - 1 + size.headroom)
        columns = jnp.zeros((size.batch, slots, config.embed_size), jnp.float32)
        return Columns(columns, slots == size.capacity)

    def __call__(
        self, x: Float[Array, "batch tokens embed"], state: Columns, context: LayerContext
    ) -> tuple[Float[Array, "batch tokens embed"], Columns]:
        values, before, after = project(x, (self.x, self.before, self.after))
        start = context.mask.start
        state = state.write(values * before, start, context.mask.num_tokens)
        weights = self.filter[...]
        mixed = sum(
            state.before(start, x.shape[1], back) * weights[back][None, None]
            for back in range(weights.shape[0])
        )
        return self.output(after * mixed), state


@pytree
class DeltaState:
    """A matrix for each head after `base` tokens, and the inputs of the tokens after them: a tape.

    `commit` folds the accepted tokens of the tape into the matrix.
    """

    matrix: Float[Array, "batch heads size size"]
    base: Int[Array, " batch"]
    keys: Float[Array, "batch slots heads size"]
    values: Float[Array, "batch slots heads size"]
    decay: Float[Array, "batch slots heads"]
    rate: Float[Array, "batch slots heads"]

    @property
    def can_truncate(self) -> bool:
        return False

    def gather(self, sources, to, num_tokens=None) -> Self:
        raise NotImplementedError("a recurrent layer reads no trees")

    def commit(self, lengths: Int[Array, " batch"]) -> Self:
        return dataclasses.replace(self, matrix=self.folded(lengths), base=lengths)

    def write(
        self, inputs: tuple[Array, ...], start: Array, num_tokens: Array | None
    ) -> "DeltaState":
        """The tape with new tokens; a row that starts at 0 has an empty state."""
        is_new = start == 0
        matrix = jnp.where(is_new[:, None, None, None], 0.0, self.matrix)
        base = jnp.where(is_new, 0, self.base)
        at = (start - base)[:, None] + jnp.arange(inputs[0].shape[1], dtype=jnp.int32)[None]
        tape = self.keys, self.values, self.decay, self.rate
        tape = [
            _write(buffer, new, at, num_tokens) for buffer, new in zip(tape, inputs, strict=True)
        ]
        return DeltaState(matrix, base, *tape)

    def folded(self, lengths: Int[Array, " batch"]) -> Float[Array, "batch heads size size"]:
        """The matrix after `lengths` tokens, of which the tape holds those after `base`."""
        count = jnp.clip(lengths - self.base, 0, self.keys.shape[1])

        def fold(i: Array, matrix: Array) -> Array:
            token = (self.keys[:, i], self.values[:, i], self.decay[:, i], self.rate[:, i])
            return jnp.where((i < count)[:, None, None, None], _updated(matrix, *token), matrix)

        return jax.lax.fori_loop(0, count.max(), fold, self.matrix)


def _updated(matrix: Array, key: Array, value: Array, decay: Array, rate: Array) -> Array:
    """The gated delta rule (arXiv 2412.06464): forget, then write what the key does not recall."""
    matrix = jnp.exp(decay)[..., None, None] * matrix
    error = value - jnp.einsum("bhkv,bhk->bhv", matrix, key)
    return matrix + rate[..., None, None] * key[..., :, None] * error[..., None, :]


class GatedDelta(nnx.Module):
    """A gated delta net with one matrix a head."""

    reads_trees: ClassVar[bool] = False

    def __init__(
        self, config: TransformerConfig, layer: LayerConfig, *, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        self.head_dim = config.head_dim
        width = config.num_heads * config.head_dim

        def linear(in_size: int, out_size: int) -> Linear:
            axes = ("embed", "mlp")
            return Linear(in_size, out_size, axes=axes, bias=False, dtype=dtype, rngs=rngs)

        self.query, self.key, self.value = (linear(config.embed_size, width) for _ in range(3))
        self.decay, self.rate = (linear(config.embed_size, config.num_heads) for _ in range(2))
        self.output = linear(width, config.embed_size)

    @staticmethod
    def new_state(config: TransformerConfig, layer: LayerConfig, size: StateSize) -> DeltaState:
        slots = size.capacity if size.headroom is None else min(size.capacity, size.headroom)
        batch, heads, head_dim = size.batch, config.num_heads, config.head_dim

        def zeros(*shape: int) -> Array:
            return jnp.zeros((batch, *shape), jnp.float32)

        tape = [zeros(slots, heads, head_dim) for _ in range(2)]
        gates = [zeros(slots, heads) for _ in range(2)]
        matrix = zeros(heads, head_dim, head_dim)
        return DeltaState(matrix, jnp.zeros((batch,), jnp.int32), *tape, *gates)

    def __call__(
        self, x: Float[Array, "batch tokens embed"], state: DeltaState, context: LayerContext
    ) -> tuple[Float[Array, "batch tokens embed"], DeltaState]:
        layers = (self.query, self.key, self.value, self.decay, self.rate)
        query, key, value, decay, rate = project(x, layers)
        shape = (*x.shape[:2], -1, self.head_dim)
        query, key, value = (each.reshape(shape) for each in (query, key, value))
        key = key / jnp.sqrt(jnp.square(key).sum(-1, keepdims=True) + 1e-6)
        inputs = (key, value, -jax.nn.softplus(decay), jax.nn.sigmoid(rate))
        start = context.mask.start
        state = state.write(inputs, start, context.mask.num_tokens)

        def step(matrix: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
            query, *inputs = token
            matrix = _updated(matrix, *inputs)
            return matrix, jnp.einsum("bhkv,bhk->bhv", matrix, query)

        by_token = [jnp.moveaxis(each, 1, 0) for each in (query, *inputs)]
        _, out = jax.lax.scan(step, state.folded(start), tuple(by_token))
        out = jnp.moveaxis(out, 0, 1).reshape(*x.shape[:2], -1)
        return self.output(out), state


MIXERS["short_convolution"] = ShortConvolution
MIXERS["gated_delta"] = GatedDelta
