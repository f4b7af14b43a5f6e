"""Sliding windows: a mask that decides what local layers see, whatever decodes."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.models.model import Model
from spec_jax.testing import tiny_model
from tests.harness import make_engine, request, run
from tests.reshaped import reshaped

WINDOW = 5


def changed(model: Model, **changes) -> Model:
    """The same weights, applied in another way."""
    config = reshaped(model.config, **changes)
    shape = Model.abstract(config, dtype=model.dtype)
    return dataclasses.replace(shape, params=model.params)


def logits(model: Model, rows: np.ndarray) -> np.ndarray:
    return np.asarray(model.score(jnp.asarray(rows), model.new_cache(*rows.shape))[0])


@pytest.fixture(scope="module")
def rows():
    return np.random.default_rng(0).integers(0, 16, (2, 14), np.int32)


def test_how_far_a_local_layer_sees(rows):
    """One layer of 5 positions: the token's own and the four before it."""
    model = changed(tiny_model(num_layers=1), sliding_window=WINDOW)
    before = logits(model, rows)[:, -1]
    for back in range(1, 9):
        other = rows.copy()
        other[:, -1 - back] ^= 1
        assert (logits(model, other)[:, -1] == before).all() == (back >= WINDOW), back


def test_windows_that_hide_nothing(rows):
    model = tiny_model()
    full = logits(model, rows)
    for changes in (
        {"sliding_window": 14},
        {"sliding_window": WINDOW, "global_every": 1, "local_rope_theta": 3.0},
    ):
        np.testing.assert_array_equal(logits(changed(model, **changes), rows), full)
    for changes in (
        {"sliding_window": 13},
        {"sliding_window": WINDOW, "global_every": 2},
        {"sliding_window": 14, "global_every": 2, "local_rope_theta": 3.0},
    ):
        assert np.abs(logits(changed(model, **changes), rows) - full).max() > 1e-3


@pytest.mark.parametrize("method", ["self", "other", "prompt_lookup"])
@pytest.mark.slow
def test_speculation_through_windows(method):
    """Greedy tokens are plain decoding's, with prompts and completions longer than the window."""
    target, draft = (
        changed(
            tiny_model(seed, sharpness=3.0, num_layers=3),
            sliding_window=window,
            global_every=2,
            local_rope_theta=100.0,
        )
        for seed, window in ((0, WINDOW), (1, 3))
    )
    prompts = np.random.default_rng(3).integers(0, 16, (3, 30))
    requests = [
        request(prompt[:length].tolist())
        for prompt, length in zip(prompts, (30, 2, 17), strict=True)
    ]
    plain = run(make_engine("none", target), requests)
    assert [len(row) for row in plain] == [40] * 3
    assert run(make_engine(method, target, draft), requests) == plain
