"""A training run, from a target to a draft."""

import dataclasses
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import distributed
from spec_jax.checkpoints import orbax_directory
from spec_jax.engine.programs import bytes_beside_arguments
from spec_jax.errors import ConfigError, TrainingError
from spec_jax.llm import LLM
from spec_jax.models.model import Model
from spec_jax.sharding import Placement
from spec_jax.text.json_lines import drop_unfinished_line, replace_lines
from spec_jax.text.prompt_files import json_lines
from spec_jax.training.config import TrainingConfig
from spec_jax.training.data import Data, data_identity, make_data
from spec_jax.training.distil import (
    Measures,
    Student,
    Teacher,
    TrainingBatch,
    TrainState,
    measure,
    optimizer_of,
    update,
)
from spec_jax.training.draft import trained_names, untrained_draft
from spec_jax.training.examples import Example
from spec_jax.training.memory import check_fits
from spec_jax.training.rows import RowFiles, TrainingRows, empty_rows
from spec_jax.training.sampling import RowSampler
from spec_jax.training.store import DATA, RUN, RunStore, holds

REPORT_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class TrainingProgress:
    """Where a run is.

    Attributes:
      step: updates made.
      steps: updates to make.
      loss: the objective's mean over the training tokens since the last evaluation.
      tokens_per_second: training tokens per second, without evaluations.
      seconds_left: estimated.
      acceptance: acceptance rates at the last evaluation: `greedy` and `sampled`.
      evaluated: whether an evaluation followed this step.
    """

    step: int
    steps: int
    loss: float
    tokens_per_second: float
    seconds_left: float
    acceptance: dict[str, float]
    evaluated: bool


@dataclasses.dataclass(frozen=True)
class TrainedDraft:
    """The result of a run.

    Attributes:
      model: the best weights, in float32.
      outputs: the target token ids that it can propose; None for all.
      step: the number of updates after which it was best.
      acceptance: its acceptance rates, `greedy` and `sampled`, on held-out prompts.
      num_tokens: tokens of its training data.
    """

    model: Model
    outputs: np.ndarray | None
    step: int
    acceptance: dict[str, float]
    num_tokens: int


class TrainingRun:
    """Trains a draft for a target.

    Args:
      llm: the target.
      config: the draft and its training.
      path: the run's directory; an interrupted run resumes there.
      examples: the beginnings of rows; without any the target generates prompts.
      identity: further values that identify this run: names of its target and of its data.
      data_dir: the directory of the rows, which runs can share; by default in the run's directory.
      on_progress: called with a line of text.

    Raises:
      ConfigError: the directory holds another run, or the config does not fit the target or the
        devices' memory.
    """

    def __init__(
        self,
        llm: LLM,
        config: TrainingConfig,
        path: Path,
        examples: Sequence[Example] = (),
        *,
        identity: Mapping[str, Any] | None = None,
        data_dir: Path | None = None,
        on_progress: Callable[[str], object] | None = None,
    ):
        orbax_directory.check_path(path)
        if llm.engine.target.placement.streamed_from is not None:
            raise ConfigError(
                "offload is 'host', but training reads the target's layers from device memory; "
                "leave offload out, or use a layout of more devices."
            )
        self._target, self._config = llm.engine.target.unpacked(), config
        self._sampler, self._examples = RowSampler(llm, config.sequence_length), examples
        self._on_progress = on_progress or (lambda line: None)
        self._placement = (
            llm.layout.place("draft", self._target.config.axis_sizes)
            if llm.layout
            else Placement.single_device()
        )
        untrained_draft(self._target, config, None, self._placement)  # refuses what does not fit
        self._check_fit(llm.max_model_len)
        self._identity, self._data_dir = identity or {}, data_dir or path / "data"
        self._metrics = path / "metrics.jsonl"
        run = {**dataclasses.asdict(config), **self._identity}
        # A run that does not fit must not claim a directory.
        if not holds(path, RUN, run):
            if not holds(self._data_dir, DATA, data_identity(config, self._identity)):
                self._sampler.check_memory(config.sample_batch)
            self._check_memory()
        self.store = RunStore(path, run)

    def _check_fit(self, context: int) -> None:
        config = self._config
        if config.sequence_length > context:
            raise ConfigError(
                f"sequence_length is {config.sequence_length}, but the target was made for a "
                f"context of {context} tokens; give at most {context}."
            )
        num_shards = self._placement.num_shards("batch")
        if config.batch_size // config.accumulate % num_shards:
            raise ConfigError(
                f"batch_size is {config.batch_size} in {config.accumulate} parts, whose rows the "
                f"layout splits into {num_shards} shards; give a multiple of "
                f"{num_shards * config.accumulate}."
            )
        for placement in (self._placement, self._target.placement):
            num_shards = placement.num_shards("vocab")
            if (config.reduced_vocab or 0) % num_shards:
                raise ConfigError(
                    f"reduced_vocab is {config.reduced_vocab}, which the layout splits into "
                    f"{num_shards} shards; give a multiple of {num_shards}."
                )

    def _check_memory(self) -> None:
        """Compiles an update of the right shapes, before the draft's output tokens are known."""
        config, target = self._config, self._target
        count = config.reduced_vocab
        self._prepare(None if count is None else np.arange(min(count, target.config.vocab_size)))
        num_shards = self._placement.num_shards("batch")
        more = (
            parts
            for parts in range(config.accumulate + 1, config.batch_size // num_shards + 1)
            if config.batch_size % (parts * num_shards) == 0
        )
        rows = empty_rows(config.batch_size, config.sequence_length, target.config.embed_size)

        def needed(parts: int) -> int:
            batch = self._put(rows, rows.normalisers, parts)
            args = (self.state, self._student, self._teacher, batch)
            return bytes_beside_arguments(self._advance.lower(*args).compile())

        check_fits(target, "an update", "accumulate", config.accumulate, more, needed)
        del self._student, self._teacher, self.state  # sampling needs the memory; see `_begin`

    def run(self) -> Iterator[TrainingProgress]:
        """Makes the data and trains; yields its progress about once a second, and at the end.

        Raises:
          TrainingError: the loss is not finite.
          OSError: for example, the disk is full.
        """
        config = self._config
        data = make_data(
            self._data_dir,
            self._sampler,
            self._examples,
            config,
            self._identity,
            self._on_progress,
        )
        self._begin(data)
        step = int(self.state.position)
        acceptance = self.history[-1] if self.history else self._evaluate(step)
        total, clock = _zero(), time.perf_counter
        reported = clock()
        # The first step waits for the compiler.
        num_timed, seconds, num_tokens = -1, 0.0, 0.0
        while step < config.steps:
            started = clock()
            batch = self._batch(self._data.train, self._numbers(step), config.accumulate)
            self.state, measures = self._advance(self.state, self._student, self._teacher, batch)
            measures = jax.tree.map(float, measures)
            step, num_timed = step + 1, num_timed + 1
            if num_timed:
                seconds, num_tokens = seconds + clock() - started, num_tokens + measures.tokens
            if not math.isfinite(measures.loss):
                raise TrainingError(
                    f"the loss of step {step} is {measures.loss}; {self.store.kept} Lower "
                    "learning_rate, or use dtype float32, in a new directory."
                )
            total = jax.tree.map(operator.add, total, measures)
            loss = total.loss / max(total.tokens, 1.0)
            evaluating = step % config.evaluate_every == 0 or step == config.steps
            if evaluating:
                acceptance, total = self._evaluate(step, loss), _zero()
            is_due = clock() - reported >= REPORT_SECONDS
            if is_due:
                reported = clock()
            if evaluating or is_due:
                yield TrainingProgress(
                    step=step,
                    steps=config.steps,
                    loss=loss,
                    tokens_per_second=num_tokens / seconds if seconds else 0.0,
                    seconds_left=(config.steps - step) * seconds / max(1, num_timed),
                    acceptance={kind: acceptance[kind] for kind in data.held_out},
                    evaluated=evaluating,
                )

    def best(self) -> TrainedDraft:
        """The draft with the highest acceptance; after `run`."""
        step = self.store.best
        assert step is not None  # there is an evaluation before the first update
        state = self.store.restore(step, self.state)
        entry = next(each for each in self.history if each["step"] == step)
        train = self._data.train
        return TrainedDraft(
            model=self._student.model.with_weights(state.weights),
            outputs=self._outputs,
            step=step,
            acceptance={kind: entry[kind] for kind in self._data.held_out},
            num_tokens=int(train.column("lengths").sum()),
        )

    def _begin(self, data: Data) -> None:
        """Creates or restores everything that training needs."""
        self._data = data
        self._outputs = _most_frequent(data.train, self._config, self._target)
        self._prepare(self._outputs)
        latest = self.store.latest
        if latest is not None:
            self._on_progress(f"resuming from step {latest}")
            self.state = self.store.restore(latest, self.state)
        # Of a killed run, entries after its latest checkpoint do not count.
        last = -1 if latest is None else latest
        entries = distributed.from_first(lambda: _entries(self._metrics))
        self.history = [entry for entry in entries if entry["step"] <= last]

    def _prepare(self, outputs: np.ndarray | None) -> None:
        """Creates the draft that proposes these tokens, and the objects that train it."""
        config, target = self._config, self._target
        draft = untrained_draft(target, config, outputs, self._placement)
        self._student = Student(draft, config.objective, config.dtype)
        self._teacher = _teacher(target, outputs)
        optimizer = optimizer_of(config)
        weights = draft.weights
        # A copy: the update overwrites the weights, and some of them may be the target's own.
        weights = {
            name: jnp.array(weights[name], jnp.float32, copy=True)
            for name in trained_names(draft, config)
        }
        self.state = TrainState(
            weights=weights,
            optimizer=optimizer.init(weights),
            position=jnp.zeros((), jnp.int32),
            key=jnp.array([config.seed, 0], jnp.uint32),
        )

        def advance(state: TrainState, student: Student, teacher: Teacher, batch: TrainingBatch):
            return update(state, student, teacher, batch, optimizer)

        self._advance = draft.jit(advance, donate_argnums=0)
        self._measure = draft.jit(measure)

    def _numbers(self, step: int) -> np.ndarray:
        """The rows of a step; every pass over the data has its own order."""
        size, count = self._config.batch_size, len(self._data.train)
        places = np.arange(step * size, (step + 1) * size)
        seed, _ = np.asarray(self.state.key)
        orders = {
            turn: np.random.default_rng([int(seed), int(turn)]).permutation(count)
            for turn in np.unique(places // count)
        }
        return np.array([orders[place // count][place % count] for place in places])

    def _batch(self, files: RowFiles, numbers: np.ndarray, parts: int) -> TrainingBatch:
        """Rows on the device; those whose number is -1 are empty."""
        rows = files.take(np.maximum(numbers, 0))
        weights = _weights(rows, files is self._data.train) * (numbers >= 0)[:, None]
        return self._put(rows, weights, parts)

    def _put(self, rows: TrainingRows, weights: np.ndarray, parts: int) -> TrainingBatch:
        placement = self._student.model.placement

        def put(array: np.ndarray) -> jax.Array:
            array = array.reshape(parts, -1, *array.shape[1:])
            return placement.put(array, None, "batch", *(None,) * (array.ndim - 2))

        return TrainingBatch(
            put(rows.tokens), put(weights), put(rows.states), put(rows.normalisers)
        )

    def _evaluate(self, step: int, loss: float | None = None) -> dict[str, Any]:
        """Measures acceptance on the held-out rows, records it, and saves a checkpoint."""
        entry: dict[str, Any] = {"step": step, "loss": loss}
        size = self._config.batch_size // self._config.accumulate
        for kind, files in self._data.held_out.items():
            total = _zero()
            for first in range(0, len(files), size):
                numbers = np.arange(first, first + size)
                numbers = np.where(numbers < len(files), numbers, -1)
                part = jax.tree.map(lambda leaf: leaf[0], self._batch(files, numbers, 1))
                measures = self._measure(self.state.weights, self._student, self._teacher, part)
                total = jax.tree.map(lambda a, b: a + float(b), total, measures)
            entry[kind] = getattr(total, kind) / max(total.tokens, 1.0)
        # In this order: a resumed run drops entries after the latest checkpoint.
        self.history.append(entry)
        distributed.from_first(lambda: replace_lines(self._metrics, self.history))
        self.store.save(step, self.state, {kind: entry[kind] for kind in self._data.held_out})
        return entry


def _zero() -> Measures:
    return Measures(*(0.0 for _ in dataclasses.fields(Measures)))  # type: ignore[arg-type]


def _entries(path: Path) -> list[dict[str, Any]]:
    """The entries of a file of measurements; none if it does not exist."""
    if not path.is_file():
        return []
    drop_unfinished_line(path, b'{"step": ')  # which earlier versions may have left
    return [value for _, value in json_lines(path.read_text(), str(path))]


def _weights(rows: TrainingRows, prompts: bool) -> np.ndarray:
    """1 at the tokens whose next token counts, else 0: float32 [rows, length].

    With `prompts` this includes the prompt, where the target's distribution is known too.
    """
    following = np.arange(rows.tokens.shape[1])[None] + 1
    counts = following < rows.lengths[:, None]
    if not prompts:
        counts &= following >= rows.begins[:, None]
    return counts.astype(np.float32)


def _most_frequent(train: RowFiles, config: TrainingConfig, target: Model) -> np.ndarray | None:
    """The ids that the draft can propose: the most frequent of the data, in order."""
    if config.reduced_vocab is None:
        return None
    size = target.config.vocab_size
    counts = np.zeros((size,), np.int64)
    columns = (train.column(name) for name in ("tokens", "begins", "lengths"))
    for tokens, begin, length in zip(*columns, strict=True):
        counts += np.bincount(tokens[begin:length], minlength=size)
    # Ties go to the first id, since vocabularies tend to be sorted by frequency.
    order = np.argsort(-counts, kind="stable")
    return np.sort(order[: min(config.reduced_vocab, size)])


def _teacher(target: Model, outputs: np.ndarray | None) -> Teacher:
    columns = np.arange(target.config.vocab_size, dtype=np.int32)
    if outputs is None:
        return Teacher(target, target.replicated(columns))
    columns[:] = -1
    columns[outputs] = np.arange(len(outputs))
    return Teacher(target.with_outputs(outputs.tolist()), target.replicated(columns))
