"""Top-k and top-p of a sharded vocabulary: whole rows come together, and go back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from spec_jax.config import SamplingParams
from spec_jax.planning.hlo import by_kind, collectives
from spec_jax.sampling.parameters import BatchSampling
from spec_jax.sampling.probabilities import warp
from spec_jax.sharding import Placement
from tests.often import often

PARAMS = [
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=0.7, top_k=50),
    SamplingParams(),
    SamplingParams(temperature=1.5, top_k=9, top_p=0.95, min_p=0.05),
]


def placed(data: int, model: int) -> Placement:
    devices = jax.devices()[: data * model]
    mesh = jax.make_mesh((data, model), ("data", "model"), (AxisType.Auto,) * 2, devices=devices)
    return Placement(mesh, (("batch", ("data",)), ("vocab", ("model",))))


def compiled(logits, sampling, placement):
    """The compiled program, and what it makes of logits that lie as models leave them."""
    along = placement.sharding("batch", None, "vocab")
    arrays = jax.tree.map(lambda leaf: placement.sharding(), sampling)
    step = jax.jit(
        lambda logits, sampling: warp(logits, sampling, placement),
        in_shardings=(along, arrays),
        out_shardings=along,
    )
    program = step.lower(logits, sampling).compile()
    found = program(jax.device_put(logits, along), jax.device_put(sampling, arrays))
    return program.as_text(), np.asarray(found)


SHAPES = [
    *((1, 8, batch, places, 4096) for batch in (1, 4) for places in (1, 5)),
    *((2, 4, batch, places, 4096) for batch in (2, 4) for places in (1, 5)),
    (4, 4, 4, 3, 131_072),
    (1, 16, 1, 1, 131_072),
]


@pytest.mark.parametrize(
    ("data", "model", "batch", "places", "vocab"), often(SHAPES, [SHAPES[0], SHAPES[7], SHAPES[8]])
)
def test_rows_are_those_of_one_device_for_two_exchanges(data, model, batch, places, vocab):
    random = np.random.default_rng(0)
    logits = 4 * random.standard_normal((batch, places, vocab), np.float32)
    logits[0, 0, ::3] = -np.inf
    logits[-1, -1, :40] = logits.max()  # ties at and above the cut
    placement = placed(data, model)
    sampling = BatchSampling.stack((PARAMS * 2)[3 : 3 + batch], vocab, placement=placement)
    text, found = compiled(jnp.asarray(logits), sampling, placement)
    assert by_kind(collectives(text)) == {"all-to-all": 2}
    # Cuts that no row has are skipped, where that takes no exchange.
    assert ("conditional(" in text) == (data == 1)
    expected = np.asarray(jax.jit(warp)(jnp.asarray(logits), sampling))
    assert ((found > 0) == (expected > 0)).all()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=0)


def test_a_gpu_skips_nothing_since_conditions_take_longer(monkeypatch):
    logits = 4 * np.random.default_rng(0).standard_normal((4, 2, 512), np.float32)
    texts, found = [], []
    for platform in ("tpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        sampling = BatchSampling.stack(PARAMS, 512)
        # A separate function, which has no program yet.
        step = jax.jit(lambda *both: warp(*both)).lower(logits, sampling).compile()
        texts.append(step.as_text())
        found.append(np.asarray(step(logits, sampling)))
    assert ["conditional(" in text for text in texts] == [True, False]
    np.testing.assert_allclose(*found, rtol=1e-6)


def test_rows_without_a_distribution_are_zeros_as_on_one_device():
    logits = np.zeros((4, 2, 64), np.float32)
    logits[0, 1, 5], logits[3, 0] = np.nan, -np.inf
    placement = placed(2, 4)
    sampling = BatchSampling.stack([PARAMS[3]] * 4, 64, placement=placement)
    _, found = compiled(jnp.asarray(logits), sampling, placement)
    assert not found[0, 1].any() and not found[3, 0].any()
    whole = np.delete(found.reshape(8, 64), [1, 6], axis=0)
    np.testing.assert_allclose(whole.sum(-1), 1, rtol=1e-6)


def test_a_vocabulary_that_shards_unevenly_stays_where_it_is():
    """As a draft's that reads another vocabulary than its own."""
    logits = jnp.asarray(np.random.default_rng(1).standard_normal((4, 1, 50), np.float32))
    placement = placed(1, 8)
    sampling = BatchSampling.stack(PARAMS, 50, placement=placement)
    found = jax.jit(lambda logits: warp(logits, sampling, placement))(logits)
    np.testing.assert_allclose(found, warp(logits, sampling), rtol=1e-6)
