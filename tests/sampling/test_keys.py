"""Children of keys are JAX's."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_jax.sampling.keys import child_key

WORD = st.integers(0, 2**32 - 1)


@settings(max_examples=50, deadline=None)
@given(words=st.tuples(WORD, WORD), index=st.integers(0, 2**31 - 1))
def test_a_child_is_what_fold_in_returns(words, index):
    key = jax.random.wrap_key_data(jnp.array(words, jnp.uint32), impl="threefry2x32")
    expected = jax.random.key_data(jax.random.fold_in(key, index))
    np.testing.assert_array_equal(jax.random.key_data(child_key(key, index)), expected)


def test_children_are_the_items_of_a_split():
    keys = jax.random.split(jax.random.key(5), (2, 3))
    halves = jax.vmap(jax.vmap(jax.random.split))(keys)
    for index in (0, 1):
        child = jax.random.key_data(child_key(keys, index))
        np.testing.assert_array_equal(child, jax.random.key_data(halves[..., index]))


def test_each_key_has_its_index():
    keys = jax.random.split(jax.random.key(5), (2, 3))
    indices = jnp.array([[0, 1, 2], [7, 2**31 - 1, 100_000]], jnp.int32)
    expected = jax.vmap(jax.vmap(jax.random.fold_in))(keys, indices)
    child = jax.random.key_data(child_key(keys, indices))
    np.testing.assert_array_equal(child, jax.random.key_data(expected))
