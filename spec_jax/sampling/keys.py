"""Keys made of other keys: `jax.random.fold_in` and `split` as arithmetic.

XLA:CPU compiles JAX's Threefry as loops of many small calls: at five places they take a twentieth
of a small model's round. Arithmetic is fused into one call for all rows and places.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key, UInt32

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_PARITY = 0x1BD11BDA


def child_key(keys: Key[Array, "*lead"], index: int | Int[Array, "*#lead"]) -> Key[Array, "*lead"]:
    """The key that `jax.random.fold_in(key, index)` returns, and `jax.random.split(key)[index]`.

    It is Threefry-2x32 of the counter (0, index) with 20 rounds (Salmon et al. 2011, "Parallel
    random numbers: as easy as 1, 2, 3").

    Args:
      keys: Threefry keys.
      index: which child of each key.
    """
    words = jax.random.key_data(keys)
    schedule = words[..., 0], words[..., 1], words[..., 0] ^ words[..., 1] ^ jnp.uint32(_PARITY)
    x, y = schedule[0], schedule[1] + jnp.asarray(index).astype(jnp.uint32)
    for group in range(1, 6):
        for bits in _ROTATIONS[(group - 1) % 2]:
            x = x + y
            y = x ^ _rotated(y, bits)
        x = x + schedule[group % 3]
        y = y + schedule[(group + 1) % 3] + jnp.uint32(group)
    return jax.random.wrap_key_data(jnp.stack([x, y], axis=-1), impl="threefry2x32")


def _rotated(words: UInt32[Array, "*lead"], bits: int) -> UInt32[Array, "*lead"]:
    return (words << jnp.uint32(bits)) | (words >> jnp.uint32(32 - bits))
