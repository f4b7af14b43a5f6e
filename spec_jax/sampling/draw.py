"""Random numbers that follow every probability a float can hold, and draws of tokens.

`jax.random.uniform` in float32 returns multiples of 2^-23 only, and JAX makes its Gumbel noise from
it: a token of probability 1e-7 would be drawn half as often as it should, one of 1e-8 never.
"""

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key, Shaped

EXPONENT_WORDS = 4
"""Random words whose leading zeros make the exponent of a uniform number; float32 has no use for
more."""
MAX_SHARDS = 256
"""Up to this many shards of the vocabulary hold whole blocks, if their number is a power of two."""


def uniform(
    key: Key[Array, ""], shape: tuple[int, ...], dtype: DTypeLike
) -> Float[Array, "*shape"]:
    """Floats in (0, 1), each as likely as the real numbers that round down to it.

    So `uniform(...) < x` has exactly the probability x, from 1 down to 2^-126. The numbers of a row
    do not depend on the length of the first axis, which depends on the row's neighbours.

    Args:
      key: the randomness.
      shape: of the result; static.
      dtype: float32 or float64.
    """
    info, words = jnp.finfo(dtype), jnp.uint64 if jnp.dtype(dtype).itemsize == 8 else jnp.uint32
    random_words = jax.random.bits(key, (*shape, 1 + EXPONENT_WORDS), words)
    mantissa = random_words[..., 0]
    zeros = jnp.zeros(shape, words)
    for i in range(EXPONENT_WORDS):
        word = random_words[..., 1 + i]
        zeros = zeros + jnp.where(zeros == i * info.bits, jax.lax.clz(word), jnp.zeros((), words))
    # A number in [1/2, 1) has no leading zero; the smallest normal number has the exponent 1.
    exponent_of_half = 2 ** (info.nexp - 1) - 2
    exponent = exponent_of_half - jnp.minimum(zeros, jnp.asarray(exponent_of_half - 1, words))
    bits = (exponent << info.nmant) | (mantissa >> (info.bits - info.nmant))
    return jax.lax.bitcast_convert_type(bits, dtype)


def argmax(x: Shaped[Array, "*lead size"]) -> Int[Array, "*lead"]:
    """`jnp.argmax` over the last axis: the first index of the largest number, or of a NaN.

    JAX (0.10) makes a new reducer for each `jnp.argmax` that it lowers, and keeps it with its trace
    as long as the process lives: some 20 KiB for every program.

    Args:
      x: numbers of any type, or booleans.
    """
    x = x.astype(jnp.int32) if x.dtype == jnp.bool_ else x
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    minimum = -jnp.inf if is_float else jnp.iinfo(x.dtype).min
    indices = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    start = jnp.asarray(minimum, x.dtype), jnp.int32(0)
    return jax.lax.reduce((x, indices), start, _larger, (x.ndim - 1,))[1]


def _larger(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """The pair with the larger number; one function, so that JAX traces it once."""
    (x, i), (y, j) = a, b
    is_larger = (x > y) | (x != x)
    is_first = is_larger | ((x == y) & (i < j))
    return jax.lax.select(is_larger, x, y), jax.lax.select(is_first, i, j)


def largest(x: Float[Array, "*lead size"]) -> Int[Array, "*lead"]:
    """The first index of the largest number along the last axis; `size` if there is a NaN.

    These are two reductions that XLA:CPU vectorises; it does not do so with `argmax`, which takes
    three times as long over a vocabulary.
    """
    indices = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    return jnp.where(x == x.max(-1, keepdims=True), indices, x.shape[-1]).min(-1)


def draw(keys: Key[Array, " batch"], probs: Float[Array, "batch vocab"]) -> Int[Array, " batch"]:
    """One token per row: first a block of the vocabulary, then a token inside it.

    Each choice is a race of independent exponential variables: the one with rate w_i comes first
    with probability w_i / sum(w). Two short races need a hundredth of the random numbers of one
    race over the vocabulary, and leave it sharded: only the block that won is gathered.

    Args:
      keys: each row's randomness.
      probs: each row's distribution, of any finite sum. A token of probability zero is never drawn.
        A row of zeros has no distribution, and its token means nothing.
    """
    count, size = blocks(probs.shape[1])
    padded = jnp.pad(probs, ((0, 0), (0, count * size - probs.shape[1])))
    parts = padded.reshape(-1, count, size)
    # Each race has separate random words: the words of the first are sharded like the blocks.
    halves = jax.vmap(lambda key: jax.random.split(key))(keys)
    race = jax.vmap(lambda key, racers: uniform(key, racers.shape, racers.dtype))
    sums = parts.sum(-1)
    block = _first(race(halves[:, 0], sums), sums)
    inside = jnp.take_along_axis(parts, block[:, None, None], axis=1, mode="clip")[:, 0]
    return block * size + _first(race(halves[:, 1], inside), inside)


def _first(
    uniforms: Float[Array, "batch racers"], rates: Float[Array, "batch racers"]
) -> Int[Array, " batch"]:
    """The index of the smallest of exponential variables with these rates."""
    # Relative to the largest rate, so that no quotient that can win leaves the float's range.
    largest_rate = rates.max(-1, keepdims=True)
    rates = rates / jnp.where(largest_rate > 0, largest_rate, jnp.ones((), rates.dtype))
    return argmax(rates / -jnp.log1p(-uniforms))


def blocks(vocab: int) -> tuple[int, int]:
    """The number and the size of the blocks of a vocabulary, both near its square root.

    If the divisors of the vocabulary's size allow it, the blocks fill the vocabulary and every
    shard has whole blocks; otherwise the last blocks are padded.
    """
    shards = min(vocab & -vocab, MAX_SHARDS)
    part = vocab // shards
    sizes = [size for size in range(1, part + 1) if part % size == 0]
    best = min(sizes, key=lambda size: vocab // size + size)
    root = math.isqrt(vocab - 1) + 1
    if vocab // best + best > 16 * root:
        best = root
    return -(-vocab // best), best
