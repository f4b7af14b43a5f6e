"""Weights (Flax NNX modules that hold arrays only) and the pure functions that apply them.

Activations are float32; the inputs of a matrix product are rounded to its weight's dtype and its
sums are float32. Weights are stored [in, out]: on CPU, products of two and more rows with
[out, in] weights repack the full weight at every call.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from spec_jax.kernels import columns, native_calls, products
from spec_jax.models.config import TransformerConfig
from spec_jax.models.rotary import LongRopeScaling, RotaryConfig, YarnScaling
from spec_jax.sharding import Placement

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


def _over_lead(vector: Float[Array, " size"], like: Float[Array, "*lead size"]) -> Array:
    """The vector in float32 with the leading axes of `like`, since rank promotion is strict."""
    return vector.astype(jnp.float32).reshape((1,) * (like.ndim - 1) + (-1,))


class Linear(nnx.Module):
    """`x @ weight + bias`; the weight is [in, out], and `axes` are the logical axes of the two."""

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *,
        axes: tuple[str, str],
        bias: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        weight = jax.random.normal(rngs.params(), (in_size, out_size)) / math.sqrt(in_size)
        self.weight = nnx.Param(weight.astype(dtype), axes=axes)
        self.bias = nnx.Param(jnp.zeros((out_size,), dtype), axes=axes[1:]) if bias else None

    def __call__(
        self,
        x: Float[Array, "*lead in"],
        placement: Placement = Placement.single_device(),
        num_tokens: Int[Array, " batch"] | None = None,
        residual: Float[Array, "*lead out"] | None = None,
    ) -> Float[Array, "*lead out"]:
        """Give the `placement` of a layer whose inputs may be sharded, so that devices sum."""
        inputs, _ = self.weight.get_metadata()["axes"]
        sums = placement.all_reduce_dtype_of(self.weight.get_value().dtype, inputs)
        return project(x, [self], sums, num_tokens, residual=residual)[0]


def project(
    x: Float[Array, "*lead in"],
    layers: Sequence[Linear],
    sums: DTypeLike = jnp.float32,
    num_tokens: Int[Array, " batch"] | None = None,
    residual: Float[Array, "*lead out"] | None = None,
) -> list[Array]:
    """The output of each layer for `x`; packed weights are read in one call.

    Args:
      x: the inputs.
      layers: the layers.
      sums: the dtype in which devices add their partial products.
      num_tokens: how many inputs of each row are real, see `products`.
      residual: what is added to the output of a single layer.
    """
    weights = [layer.weight.get_value() for layer in layers]
    biases = [
        None if layer.bias is None else layer.bias[...].astype(jnp.float32) for layer in layers
    ]
    return products(x, weights, sums, num_tokens, biases, residual)


class Norm(nnx.Module):
    """RMS norm (`kind="rms"`) or layer norm with a bias (`kind="layer"`), in float32."""

    def __init__(self, size: int, *, kind: str, eps: float, dtype: DTypeLike):
        self.kind, self.eps = kind, eps
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.bias = nnx.Param(jnp.zeros((size,), dtype)) if kind == "layer" else None

    def __call__(
        self,
        x: Float[Array, "*lead size"],
        backend: str | None = None,
        num_tokens: Int[Array, " batch"] | None = None,
    ) -> Float[Array, "*lead size"]:
        """With the backend `native`, a row does not depend, to the last bit, on other rows.

        That backend skips padding: of inputs [batch, tokens, size], all but the first `num_tokens`
        of each.
        """
        x = x.astype(jnp.float32)
        if backend == "native":
            rows, of = x.reshape(-1, x.shape[-1]), self._native_arguments()
            return native_calls.norm(rows, **of, num_tokens=num_tokens).reshape(x.shape)
        if self.kind == "layer":
            x = x - x.mean(-1, keepdims=True)
        variance = jnp.square(x).mean(-1, keepdims=True)
        out = x * jax.lax.rsqrt(variance + self.eps) * _over_lead(self.weight[...], x)
        return out if self.bias is None else out + _over_lead(self.bias[...], out)

    def of_sum(
        self,
        x: Float[Array, "*lead size"],
        added: Float[Array, "*lead size"],
        backend: str | None = None,
        num_tokens: Int[Array, " batch"] | None = None,
    ) -> tuple[Float[Array, "*lead size"], Float[Array, "*lead size"]]:
        """`x + added`, and its norm."""
        if backend != "native":
            total = x + added
            return total, self(total, backend, num_tokens)
        rows = (each.astype(jnp.float32).reshape(-1, x.shape[-1]) for each in (x, added))
        results = native_calls.norm_of_sum(*rows, **self._native_arguments(), num_tokens=num_tokens)
        total, normed = (each.reshape(x.shape) for each in results)
        return total, normed

    def _native_arguments(self) -> dict[str, Any]:
        bias = None if self.bias is None else self.bias[...].astype(jnp.float32)
        weight = self.weight[...].astype(jnp.float32)
        return {"weight": weight, "bias": bias, "eps": self.eps, "centered": self.kind == "layer"}


def norm_of(config: TransformerConfig, dtype: DTypeLike) -> Norm:
    """A norm of the residual stream."""
    return Norm(config.embed_size, kind=config.norm, eps=config.norm_eps, dtype=dtype)


class Embedding(nnx.Module):
    """The token table, stored [embed, vocab] so that a tied head is a product like any other."""

    def __init__(self, vocab_size: int, embed_size: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        table = jax.random.normal(rngs.params(), (embed_size, vocab_size)) * 0.02
        self.weight = nnx.Param(table.astype(dtype), axes=("embed", "vocab"))

    def __call__(self, tokens: Int[Array, "batch tokens"]) -> Float[Array, "batch tokens embed"]:
        return columns(self.weight.get_value(), tokens)


class Positions(nnx.Module):
    """A learned table of positions, stored [embed, positions] like the token table."""

    def __init__(self, count: int, embed_size: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        table = jax.random.normal(rngs.params(), (embed_size, count)) * 0.02
        self.weight = nnx.Param(table.astype(dtype), axes=("embed", None))

    def __call__(self, positions: Int[Array, "batch tokens"]) -> Float[Array, "batch tokens embed"]:
        table = self.weight.get_value()
        # Drafted tokens may stand past the end; they are never accepted.
        return columns(table, jnp.minimum(positions, table.shape[1] - 1))


class RelativeBias(nnx.Module):
    """A bias of each head by the distance from key to query, in buckets (T5, arXiv 1910.10683).

    Without `causal`, keys that come after the query have other buckets than keys before it.
    """

    def __init__(
        self,
        buckets: int,
        distance: int,
        num_heads: int,
        *,
        causal: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.buckets = relative_buckets(buckets, distance, causal=causal)
        table = jax.random.normal(rngs.params(), (num_heads, buckets)) * 0.02
        self.weight = nnx.Param(table.astype(dtype), axes=("heads", None))

    def __call__(self) -> Float[Array, "heads distances"]:
        """The bias by distance, as `attention.attend` takes it."""
        return self.weight[...].astype(jnp.float32)[:, np.array(self.buckets)]


def positions_of(config: TransformerConfig, dtype: DTypeLike, rngs: nnx.Rngs) -> Positions | None:
    """The table of positions of a stack that has one."""
    if not config.learned_positions:
        return None
    return Positions(config.max_position, config.embed_size, dtype=dtype, rngs=rngs)


def relative_bias_of(
    config: TransformerConfig, causal: bool, dtype: DTypeLike, rngs: nnx.Rngs
) -> RelativeBias | None:
    """The biases by distance of a stack that has them."""
    if not config.relative_buckets:
        return None
    return RelativeBias(
        config.relative_buckets,
        config.relative_distance,
        config.num_heads,
        causal=causal,
        dtype=dtype,
        rngs=rngs,
    )


def relative_buckets(buckets: int, distance: int, *, causal: bool) -> tuple[int, ...]:
    """The bucket of each distance from key to query, from `-distance` to `distance`.

    Half of the buckets hold one distance each, the others more and more; all distances from
    `distance` on share the last. Computed in float32 as by Hugging Face, which decides at the
    edges.
    """
    behind = np.arange(-distance, distance + 1)
    first = np.zeros_like(behind)
    if causal:
        behind = np.maximum(behind, 0)
    else:
        buckets //= 2
        first, behind = np.where(behind < 0, buckets, 0), np.abs(behind)
    exact = buckets // 2
    ratio = np.log(np.maximum(behind, 1).astype(np.float32) / np.float32(exact))
    ratio = ratio / np.float32(math.log(distance / exact)) * np.float32(buckets - exact)
    large = np.minimum(exact + ratio.astype(np.int64), buckets - 1)
    return tuple((first + np.where(behind < exact, behind, large)).tolist())


def rope_frequencies(rotary: RotaryConfig, head_dim: int, context: int) -> Float[Array, " half"]:
    """Rotary frequencies in radians per position (Su et al. 2021, arXiv 2104.09864).

    `context` is the longest one, which LongRoPE's scaling depends on.
    """
    rotary_size, theta, scaling = rotary.size(head_dim), rotary.theta, rotary.scaling
    exponents = jnp.arange(0, rotary_size, 2, dtype=jnp.float32) / rotary_size
    frequencies = 1.0 / (theta**exponents) / rotary.factor
    if scaling is None:
        return frequencies
    if isinstance(scaling, LongRopeScaling):
        return frequencies / np.array(scaling.divisors(context), np.float32)
    if isinstance(scaling, YarnScaling):

        def index(turns: float) -> float:
            """The frequency with this many turns within the original context."""
            wavelength = scaling.original_max_position / (turns * 2 * math.pi)
            return rotary_size * math.log(wavelength) / (2 * math.log(theta))

        first, last = index(scaling.fast), index(scaling.slow)
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rotary_size - 1)
        last += 0.001 * (first == last)
        steps = jnp.arange(rotary_size // 2, dtype=jnp.float32)
        stretched = jnp.clip((steps - first) / (last - first), 0.0, 1.0)
        return frequencies * (stretched / scaling.factor + (1 - stretched))
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = jnp.clip((scaling.original_max_position / wavelengths - low) / (high - low), 0.0, 1.0)
    return frequencies * ((1 - keep) / scaling.factor + keep)


def alibi_slopes(num_heads: int, scale: float) -> tuple[float, ...]:
    """How much each head lowers scores for a step of distance (Press et al., arXiv 2108.12409).

    Powers of 2^(-8/n) for n heads; if n is not a power of two, the next smaller power has its
    slopes, and the other heads have every second slope of twice that power. All are multiplied by
    `scale`; empty if that is 0.
    """
    if scale == 0:
        return ()
    power = 2 ** int(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * (num_heads - power), 2)]
    return tuple(scale * slope for slope in slopes)


def rotate(
    x: Float[Array, "batch tokens heads head_dim"],
    rotation: Float[Array, "2 batch tokens half"],
) -> Float[Array, "batch tokens heads head_dim"]:
    """Rotates the leading `2 * half` dimensions of each head, first half against second.

    Args:
      x: queries or keys.
      rotation: cosines and sines.
    """
    half = rotation.shape[-1]
    cos, sin = rotation[:, :, :, None]
    first, second = x[..., :half], x[..., half : 2 * half]
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*rotated, x[..., 2 * half :]], axis=-1)
