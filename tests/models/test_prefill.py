"""Prompts read in blocks: into full caches and rings, beside shorter and longer ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.models.model import Model
from spec_jax.models.prefill import prefill
from spec_jax.testing import tiny_model
from tests import quick
from tests.reshaped import reshaped

WINDOW, BLOCK = 5, 32


def with_windows(model: Model) -> Model:
    """The same weights; every other layer sees a window."""
    config = reshaped(model.config, sliding_window=WINDOW, global_every=2)
    return dataclasses.replace(Model.abstract(config, dtype=model.dtype), params=model.params)


def test_rows_of_any_length_in_rings_are_as_if_all_slots_were_there():
    """A short row among long ones is read to its end and no further: its ring keeps its text."""
    model = with_windows(tiny_model())
    lengths = jnp.asarray([1, 2, 30, 33, 200, 255], jnp.int32)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 16, (6, 256)), jnp.int32)

    @jax.jit
    def after(cache):
        cache = prefill(model, tokens, lengths - 1, cache, BLOCK)
        following = jax.vmap(lambda row, n: jax.lax.dynamic_slice_in_dim(row, n - 1, 1))
        return model.score(following(tokens, lengths), cache)[0]

    rings = model.new_cache(6, 256, headroom=BLOCK)
    assert [layer.ring for layer in rings.layers] == [True, False]
    np.testing.assert_allclose(after(rings), after(model.new_cache(6, 256)), rtol=1e-5, atol=1e-5)


def test_a_long_prompt_needs_little_memory_beside_weights_and_caches():
    """8,192 tokens: no array of [heads, block, slots] is made."""
    model = tiny_model(max_position=16384)

    def read(model, tokens, lengths):
        cache = model.new_cache(*tokens.shape, headroom=512)
        return prefill(model, tokens, lengths - 1, cache, 512)

    lowered = jax.jit(read).lower(
        model, jnp.zeros((1, 8704), jnp.int32), jnp.full((1,), 8192, jnp.int32)
    )
    options = quick.OPTIMIZED.__get__(model)
    size = lowered.compile(compiler_options=options).memory_analysis()
    needed = size.argument_size_in_bytes + size.output_size_in_bytes
    assert needed + size.temp_size_in_bytes < 1.5 * needed
