"""The update: how far a draft's distribution is from its target's, and one step towards it."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, UInt

from spec_jax.decoding.cache import Places
from spec_jax.models.model import Model
from spec_jax.pytree import pytree, static
from spec_jax.training.config import TrainingConfig

UNROLLED, STRIDE = 3, 3
"""Of a draft that reads states; see `Student`."""


@pytree
class Batch:
    """Rows on the device, in parts that are read one after another.

    Attributes:
      tokens: token ids.
      weights: 1 at tokens after which a learnt token stands, else 0.
      states: the target's, as in `Rows`.
      normalisers: as in `Rows`.
    """

    tokens: Int[Array, "parts rows length"]
    weights: Float[Array, "parts rows length"]
    states: Float[Array, "parts rows length embed"]
    normalisers: Float[Array, "parts rows length"]


@pytree
class Teacher:
    """What tells the target's distribution from its states.

    Attributes:
      model: the target, its head cut down to what the draft can propose.
      columns: of each of the target's ids the output that means it, or -1.
    """

    model: Model
    columns: Int[Array, " vocab"]


@pytree
class Measures:
    """Sums over the tokens of a batch, on the device or, as numbers, on the host.

    Attributes:
      loss: the objective.
      sampled: probability that the draft's token is kept at temperature 1: sum of min(p, q).
      greedy: whether the draft's likeliest token is the one that stands there.
      tokens: tokens summed over.
    """

    loss: Float[Array, ""] | float
    sampled: Float[Array, ""] | float
    greedy: Float[Array, ""] | float
    tokens: Float[Array, ""] | float


@pytree
class TrainState:
    """All that a training run is, but for its data.

    Attributes:
      weights: what is trained, in float32, by name.
      optimizer: optax's state.
      position: updates made, which is also where the run is in its data.
      key: where the order of the data comes from.
    """

    weights: dict[str, Array]
    optimizer: Any
    position: Int[Array, ""]
    key: UInt[Array, " words"]


@pytree
class Student:
    """A draft in training.

    Attributes:
      model: the draft; of its weights those in `TrainState` count instead.
      objective: what is lowered.
      dtype: of its matrix products.
      unrolled: tokens of a draft that are learnt: where the draft reads states, those past the
        first read its own (HASS, arXiv 2408.15766; EAGLE-3, arXiv 2503.01840).
      stride: tokens between the drafts of which more than the first token is learnt. Later tokens
        matter less, since they are lost with any before them.
    """

    model: Model
    objective: str = static()
    dtype: str = static()
    unrolled: int = static(default=1)
    stride: int = static(default=1)

    def with_weights(self, weights: dict[str, Array]) -> Model:
        """The draft with trained weights, in the dtype that products are taken in."""
        model = self.model.with_weights(weights)
        return dataclasses.replace(
            model, params=jax.tree.map(lambda leaf: leaf.astype(self.dtype), model.params)
        )


def measure(
    weights: dict[str, Array],
    student: Student,
    teacher: Teacher,
    part: Batch,
    offset: Int[Array, ""] | int = 0,
) -> Measures:
    """How the draft does on one part of a batch (without the axis `parts`).

    Where the draft can propose few tokens, the others count as never proposed. `offset`, less than
    the student's stride, is where the first draft begins whose later tokens are measured.
    """
    model = student.with_weights(weights)
    log_p = teacher.model.exit(part.states) - part.normalisers[..., None]
    column = teacher.columns[jnp.roll(part.tokens, -1, axis=1)]

    def compare(at: Int[Array, " places"], own: Float[Array, "rows places embed"]) -> Measures:
        known, wanted, counts = (
            jnp.take(each, at, axis=1, mode="fill", fill_value=0)
            for each in (log_p, column, part.weights)
        )
        log_q, p = jax.nn.log_softmax(model.exit(own), axis=-1), jnp.exp(known)
        kept = jnp.minimum(p, jnp.exp(log_q)).sum(-1)
        if student.objective == "kl":
            losses = (p * (known - log_q)).sum(-1)
        elif student.objective == "tv":
            losses = 1.0 - kept
        else:
            said = jnp.take_along_axis(log_q, jnp.maximum(wanted, 0)[..., None], axis=-1)[..., 0]
            losses = jnp.where(wanted >= 0, -said, 0.0)
        right = (log_q.argmax(-1) == wanted).astype(jnp.float32)

        def total(each: Array) -> Array:
            return (each * counts).sum()

        return Measures(total(losses), total(kept), total(right), counts.sum())

    measures = [compare(*each) for each in _drafted(model, student, part, offset)]
    return jax.tree.map(lambda *each: sum(each[1:], start=each[0]), *measures)


def _drafted(
    model: Model, student: Student, part: Batch, offset: Int[Array, ""] | int
) -> Iterator[tuple[Int[Array, " places"], Float[Array, "rows places embed"]]]:
    """Places, and the draft's last states there: as first tokens of drafts, as second ones ...

    The n-th token of a draft sees the text before the draft as the first does, and the drafted
    tokens before it as their own passes left them.
    """
    rows, length = part.tokens.shape
    layers, count = model.config.num_layers, length // student.stride
    cache = model.new_cache(rows, length + (student.unrolled - 1) * count)
    before = None
    if model.config.reads_states:
        before = jnp.pad(part.states.astype(jnp.float32), ((0, 0), (1, 0), (0, 0)))[:, :-1]
    own, cache = model.begin(part.tokens, cache, layers, states=before)
    yield jnp.arange(length, dtype=jnp.int32), own
    entries = jnp.arange(length, dtype=jnp.int32)[None]
    for nth in range(1, student.unrolled):
        at = offset + nth + student.stride * jnp.arange(count, dtype=jnp.int32)
        drafted = jnp.tile(jnp.eye(count, dtype=bool), (1, nth))
        later = jnp.zeros((count, (student.unrolled - 1 - nth) * count), bool)
        visible = jnp.concatenate([entries <= at[:, None] - nth, drafted, later], axis=1)
        places = Places(jnp.tile(at[None], (rows, 1)), jnp.tile(visible[None], (rows, 1, 1)))
        before = own if nth > 1 else jnp.take(own, at - 1, axis=1, mode="clip")
        tokens = jnp.take(part.tokens, at, axis=1, mode="clip")
        cache = cache.with_lengths(jnp.full((rows,), length + (nth - 1) * count, jnp.int32))
        own, cache = model.begin(tokens, cache, layers, places, before)
        yield at, own


def optimizer_of(config: TrainingConfig) -> optax.GradientTransformation:
    """AdamW behind clipping, warmed up and cooled down."""
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
    batch: Batch,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, Measures]:
    """One step on a batch; the measures are those before it."""
    count = jnp.maximum(batch.weights.sum(), 1.0)

    def objective(weights: dict[str, Array], part: Batch) -> tuple[Array, Measures]:
        offset = state.position % student.stride
        measures = measure(weights, student, teacher, part, offset)
        return measures.loss / count, measures

    def add(sums: tuple, part: Batch) -> tuple[tuple, None]:
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
