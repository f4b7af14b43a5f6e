"""The update: measures a draft against its target's distribution, and makes one step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

from spec_jax.errors import extra
from spec_jax.models.model import Model
from spec_jax.pytree import pytree, static
from spec_jax.sampling.draw import largest
from spec_jax.training.config import TrainingConfig

with extra("train"):
    import optax


@pytree
class TrainingBatch:
    """Rows on the device, in parts that are read one after another.

    Attributes:
      tokens: token ids.
      weights: 1 at tokens whose next token is trained on, else 0.
      states: the target's hidden states, as in `TrainingRows`.
      normalisers: as in `TrainingRows`.
    """

    tokens: Int[Array, "parts rows length"]
    weights: Float[Array, "parts rows length"]
    states: Float[Array, "parts rows length embed"]
    normalisers: Float[Array, "parts rows length"]


@pytree
class Teacher:
    """Computes the target's distribution from its hidden states.

    Attributes:
      model: the target, with a head reduced to the tokens that the draft can propose.
      columns: the output for each of the target's ids, or -1.
    """

    model: Model
    columns: Int[Array, " vocab"]


@pytree
class Measures:
    """Sums over the tokens of a batch, on the device or, as numbers, on the host.

    Attributes:
      loss: the objective.
      sampled: probability that the draft's token is accepted at temperature 1: sum of min(p, q).
      greedy: whether the draft's likeliest token is the token of the row.
      tokens: tokens summed over.
    """

    loss: Float[Array, ""] | float
    sampled: Float[Array, ""] | float
    greedy: Float[Array, ""] | float
    tokens: Float[Array, ""] | float


@pytree
class TrainState:
    """The complete state of a training run, except for its data.

    Attributes:
      weights: the trained weights, in float32, by name.
      optimizer: optax's state.
      position: updates made, which is also the position in the data.
      key: the random key of the order of the data.
    """

    weights: dict[str, Array]
    optimizer: Any
    position: Int[Array, ""]
    key: UInt[Array, " words"]


@pytree
class Student:
    """A draft in training.

    Attributes:
      model: the draft; weights in `TrainState` replace its own.
      objective: the loss to minimise.
      dtype: of its matrix products.
    """

    model: Model
    objective: str = static()
    dtype: str = static()

    def with_weights(self, weights: dict[str, Array]) -> Model:
        """The draft with trained weights, in the dtype of its products."""
        model = self.model.with_weights(weights)
        return dataclasses.replace(
            model, params=jax.tree.map(lambda leaf: leaf.astype(self.dtype), model.params)
        )


def measure(
    weights: dict[str, Array], student: Student, teacher: Teacher, part: TrainingBatch
) -> Measures:
    """Measures the draft on one part of a batch (without the axis `parts`).

    Tokens that the draft cannot propose count as tokens of probability 0.
    """
    model = dataclasses.replace(student.with_weights(weights), attention="dense")
    cache = model.new_cache(*part.tokens.shape)
    states, _ = model.run_first_layers(part.tokens, cache, model.config.num_layers)
    log_q = jax.nn.log_softmax(model.logits(states), axis=-1)
    log_p = teacher.model.logits(part.states) - part.normalisers[..., None]
    p = jnp.exp(log_p)
    following = jnp.roll(part.tokens, -1, axis=1)
    column = teacher.columns[following]
    accepted = jnp.minimum(p, jnp.exp(log_q)).sum(-1)
    if student.objective == "kl":
        losses = (p * (log_p - log_q)).sum(-1)
    elif student.objective == "tv":
        losses = 1.0 - accepted
    else:
        log_prob = jnp.take_along_axis(log_q, jnp.maximum(column, 0)[..., None], axis=-1)[..., 0]
        losses = jnp.where(column >= 0, -log_prob, 0.0)
    right = (largest(log_q) == column).astype(jnp.float32)

    def total(each: Array) -> Array:
        return (each * part.weights).sum()

    return Measures(total(losses), total(accepted), total(right), part.weights.sum())


def optimizer_of(config: TrainingConfig) -> optax.GradientTransformation:
    """AdamW after gradient clipping, with warm-up and decay of the learning rate."""
    warmup = min(config.warmup_steps, config.steps - 1)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0 if warmup else config.learning_rate,
        config.learning_rate,
        warmup,
        config.steps,
        config.learning_rate / 10,
    )
    decay = optax.adamw(
        schedule,
        weight_decay=config.weight_decay,
        mask=lambda weights: jax.tree.map(lambda leaf: leaf.ndim > 1, weights),
    )
    return optax.chain(optax.clip_by_global_norm(config.clip), decay)


def update(
    state: TrainState,
    student: Student,
    teacher: Teacher,
    batch: TrainingBatch,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, Measures]:
    """One step on a batch; the measures are of the weights before it."""
    count = jnp.maximum(batch.weights.sum(), 1.0)

    def objective(weights: dict[str, Array], part: TrainingBatch) -> tuple[Array, Measures]:
        measures = measure(weights, student, teacher, part)
        return measures.loss / count, measures

    def add(sums: tuple, part: TrainingBatch) -> tuple[tuple, None]:
        gradient, measures = jax.grad(objective, has_aux=True)(state.weights, part)
        return jax.tree.map(jnp.add, sums, (gradient, measures)), None

    zero = jnp.zeros(())
    none = (jax.tree.map(jnp.zeros_like, state.weights), Measures(zero, zero, zero, zero))
    (gradient, measures), _ = jax.lax.scan(add, none, batch)
    with jax.numpy_dtype_promotion("standard"):  # which optax relies on
        changes, optimizer_state = optimizer.update(gradient, state.optimizer, state.weights)
        weights: Any = optax.apply_updates(state.weights, changes)
    after = TrainState(weights, optimizer_state, state.position + 1, state.key)
    return after, measures
