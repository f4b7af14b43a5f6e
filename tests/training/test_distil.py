"""The update, against NumPy and against itself in other pieces."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.testing import tiny_model
from spec_jax.training.config import TrainingConfig
from spec_jax.training.distil import (
    Student,
    Teacher,
    TrainingBatch,
    TrainState,
    measure,
    optimizer_of,
    update,
)
from tests.often import often

TARGET, DRAFT = tiny_model(0), tiny_model(1)
OUTPUTS = [0, 2, 3, 5, 8, 13]


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def example(reduced: bool, parts: int = 1):
    """A student, its teacher, a batch, and both models' probabilities after every token."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 16, (4, 10)).astype(np.int32)
    cache = TARGET.new_cache(*tokens.shape)
    states, _ = TARGET.run_first_layers(jnp.asarray(tokens), cache, TARGET.config.num_layers)
    logits = np.asarray(TARGET.logits(states), np.float64)
    normalisers = np.log(np.exp(logits).sum(-1)).astype(np.float32)
    p = softmax(logits)
    q = softmax(np.asarray(DRAFT.score(jnp.asarray(tokens), DRAFT.new_cache(4, 10))[0], np.float64))
    columns = np.arange(16, dtype=np.int32)
    target, draft = TARGET, DRAFT
    if reduced:
        columns = np.full(16, -1, np.int32)
        columns[OUTPUTS] = np.arange(len(OUTPUTS))
        target, draft = TARGET.with_outputs(OUTPUTS), DRAFT.with_outputs(OUTPUTS)
        unable = np.delete(np.arange(16), OUTPUTS)
        q[..., unable] = 0
        q /= q.sum(-1, keepdims=True)
    weights = (random.random((4, 10)) < 0.6).astype(np.float32)
    weights[:, -1] = 0

    def cut(array):
        return jnp.asarray(np.asarray(array).reshape(parts, 4 // parts, *array.shape[1:]))

    batch = TrainingBatch(cut(tokens), cut(weights), cut(states), cut(normalisers))
    student = Student(draft, "kl", "float32")
    return student, Teacher(target, jnp.asarray(columns)), batch, tokens, weights, p, q


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("objective", ["kl", "tv", "ce"])
def test_measures_are_those_of_the_definitions(objective, reduced):
    student, teacher, batch, tokens, weights, p, q = example(reduced)
    student = dataclasses.replace(student, objective=objective)
    part = jax.tree.map(lambda leaf: leaf[0], batch)
    found = measure(student.model.weights, student, teacher, part)
    following = np.roll(tokens, -1, axis=1)
    kept = np.minimum(p, q).sum(-1)
    said = np.take_along_axis(q, following[..., None], -1)[..., 0]
    with np.errstate(divide="ignore", invalid="ignore"):
        wanted = {
            "kl": np.where(q > 0, p * np.log(p / q), 0).sum(-1),
            "tv": 1 - kept,
            "ce": np.where(said > 0, -np.log(said), 0),
        }[objective]
    assert float(found.loss) == pytest.approx((wanted * weights).sum(), rel=1e-4)
    assert float(found.sampled) == pytest.approx((kept * weights).sum(), rel=1e-4)
    assert float(found.greedy) == ((q.argmax(-1) == following) * weights).sum()
    assert float(found.tokens) == weights.sum()


def first_state(student, config):
    weights = {name: jnp.asarray(value) for name, value in student.model.weights.items()}
    optimizer = optimizer_of(config)
    key = jnp.zeros((2,), jnp.uint32)
    return TrainState(weights, optimizer.init(weights), jnp.int32(0), key), optimizer


@pytest.mark.slow
def test_accumulating_over_parts_is_the_update_on_the_whole():
    config = TrainingConfig(steps=10, warmup_steps=0)
    after = []
    for parts in (1, 4):
        student, teacher, batch, *_ = example(False, parts)
        state, optimizer = first_state(student, config)
        state, measures = update(state, student, teacher, batch, optimizer)
        after.append((state.weights, measures))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), after[0], after[1]
    )


@pytest.mark.parametrize("objective", often(["kl", "tv", "ce"], ["kl"]))
def test_updates_lower_the_objective(objective):
    student, teacher, batch, *_ = example(False)
    student = dataclasses.replace(student, objective=objective)
    state, optimizer = first_state(student, TrainingConfig(steps=40, warmup_steps=2))
    step = jax.jit(lambda state: update(state, student, teacher, batch, optimizer))
    losses = []
    for _ in range(40):
        state, measures = step(state)
        losses.append(float(measures.loss))
    assert losses[-1] < 0.7 * losses[0]
    assert int(state.position) == 40
