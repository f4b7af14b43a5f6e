"""What a model makes of its platform."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.models.config import Experts
from spec_jax.models.model import Model
from spec_jax.sharding import Placement
from spec_jax.testing import tiny_model

SPARSE = Experts(count=4, per_token=2, size=16)


@pytest.mark.parametrize(
    ("platform", "dtype", "experts", "rows"),
    [
        ("cpu", jnp.bfloat16, None, 2),
        ("gpu", jnp.bfloat16, None, 2),
        ("gpu", jnp.bfloat16, SPARSE, 1),  # two tokens would read more experts
        ("gpu", jnp.float32, None, 1),
        ("tpu", jnp.bfloat16, None, 1),
    ],
)
def test_a_single_row_has_a_neighbour_where_its_products_are_slow(
    platform, dtype, experts, rows, monkeypatch
):
    monkeypatch.setattr(Placement, "platform", platform)
    config = dataclasses.replace(tiny_model(vocab_size=40).config, experts=experts)
    model = Model.random(config, dtype=dtype)
    token, cache = jnp.ones((1, 1), jnp.int32), model.new_cache(1, 48)
    program = str(jax.make_jaxpr(model.score)(token, cache))
    assert re.findall(r"f32\[1,(\d+),40\] = dot_general", program) == [str(rows)]  # the head
    of_queries = rf"f32\[1,(\d+),{config.num_heads * config.head_dim}\] = dot_general"
    assert set(re.findall(of_queries, program)) == {str(rows)}

    logits, *_ = model.score(token, cache)
    assert logits.shape == (1, 1, config.vocab_size)
    both, *_ = model.score(jnp.ones((1, 2), jnp.int32), model.new_cache(1, 48))
    np.testing.assert_allclose(logits[:, 0], both[:, 0], atol=2e-2 if rows == 2 else 5e-2)
