"""Drafts of targets with sparse experts: their layers keep their kinds, and experts learn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.models.config import Experts
from spec_jax.models.model import Model
from spec_jax.testing import tiny_model
from spec_jax.training.config import TrainingConfig
from spec_jax.training.distil import (
    Student,
    Teacher,
    TrainingBatch,
    TrainState,
    optimizer_of,
    update,
)
from spec_jax.training.draft import untrained_draft
from tests.reshaped import reshaped

EXPERTS = Experts(count=6, per_token=2, size=24)
TARGET = Model.random(
    reshaped(tiny_model().config, num_layers=4, experts=EXPERTS, dense_layers=(1, 2)), seed=1
)


@pytest.mark.parametrize(
    ("layers", "dense"), [((0, 3), ()), ((1, 3), (0,)), ((0, 1, 2), (1, 2)), ((3,), ())]
)
def test_layers_keep_their_kinds(layers, dense):
    config = TrainingConfig(layers=len(layers), from_layers=layers)
    draft = untrained_draft(TARGET, config, None, TARGET.placement)
    kinds = [layer.mlp for layer in draft.config.layers]
    assert tuple(i for i, kind in enumerate(kinds) if kind == "dense") == dense
    for i, layer in enumerate(layers):
        for name, weight in draft.weights.items():
            if name.startswith(f"blocks.{i}."):
                source = name.replace(f"blocks.{i}.", f"blocks.{layer}.")
                np.testing.assert_array_equal(weight, TARGET.weights[source])


def test_a_narrower_draft_has_narrower_experts():
    config = TrainingConfig(layers=2, width=16, embedding="own")
    draft = untrained_draft(TARGET, config, None, TARGET.placement)
    assert draft.config.experts == dataclasses.replace(EXPERTS, size=12)
    assert [layer.mlp for layer in draft.config.layers] == ["experts", "experts"]
    assert draft.weights["blocks.0.mlp.expert_up.weight"].shape == (6, 16, 12)


@pytest.mark.slow
def test_experts_learn():
    config = TrainingConfig(layers=2, from_layers=(0, 1))
    draft = untrained_draft(TARGET, config, None, TARGET.placement)
    tokens = np.random.default_rng(0).integers(0, 16, (1, 4, 10)).astype(np.int32)
    states, _ = TARGET.run_first_layers(jnp.asarray(tokens[0]), TARGET.new_cache(4, 10), 4)
    normalisers = jax.nn.logsumexp(TARGET.logits(states), axis=-1)
    batch = TrainingBatch(tokens, jnp.ones((1, 4, 10)), states[None], normalisers[None])
    teacher, student = Teacher(TARGET, jnp.arange(16)), Student(draft, "kl", "float32")
    config = TrainingConfig(steps=30, warmup_steps=2)
    optimizer = optimizer_of(config)
    weights = draft.weights
    state = TrainState(weights, optimizer.init(weights), jnp.int32(0), jnp.zeros((2,), jnp.uint32))
    step = jax.jit(lambda state: update(state, student, teacher, batch, optimizer))
    losses = []
    for _ in range(30):
        state, measures = step(state)
        losses.append(float(measures.loss))
    assert losses[-1] < 0.5 * losses[0]
    for name in ("router", "expert_gate", "expert_up", "expert_down"):
        name = f"blocks.0.mlp.{name}.weight"
        moved = np.abs(np.asarray(state.weights[name] - weights[name]))
        assert moved.reshape(moved.shape[0], -1).max(1).min() > 1e-4, name
