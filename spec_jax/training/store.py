"""A run on disk: its identity, and its latest and best weights."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import filelock

from spec_jax import distributed
from spec_jax.checkpoints.bucket import first_line
from spec_jax.errors import CheckpointError, ConfigError, extra
from spec_jax.files import replace_text
from spec_jax.training.distil import TrainState

LOCK = "lock"
RUN = "run.json", "training run"
DATA = "data.json", "training data"
"""The file that identifies a directory, and the name of its contents in messages."""
_VERSION = 1


def claim(path: Path, kind: tuple[str, str], identity: Mapping[str, Any]) -> None:
    """Marks a locked directory with an identity, unless it has it already; raises as `holds`."""
    if not holds(path, kind, identity):
        text = json.dumps(_versioned(identity), indent=2) + "\n"
        distributed.from_first(lambda: replace_text(path / kind[0], text))


def holds(path: Path, kind: tuple[str, str], identity: Mapping[str, Any]) -> bool:
    """Whether a directory has this identity already; if not, it is new or empty.

    Args:
      path: the directory.
      kind: `RUN` or `DATA`.
      identity: the expected identity.

    Raises:
      ConfigError: it has another identity, or holds something else.
    """
    name, what = kind
    file, expected = path / name, _versioned(identity)
    is_foreign = path.exists() and not file.is_file()
    is_foreign = is_foreign and (
        not path.is_dir() or any(each.name != LOCK for each in path.iterdir())
    )
    actual = json.loads(file.read_text()) if file.is_file() else None
    distributed.agree({f"what it finds in {path}": (is_foreign, actual)})
    if is_foreign:
        raise ConfigError(
            f"{path} exists and holds no {what}; choose a new directory, nothing is overwritten."
        )
    if actual is not None and actual != expected:
        differences = [
            f"{key} is {actual.get(key)!r} there and {expected.get(key)!r} here"
            for key in sorted({*actual, *expected})
            if actual.get(key) != expected.get(key)
        ]
        raise ConfigError(
            f"{path} holds another {what}: {'; '.join(differences)}. Choose a new directory, or "
            "give the same options to resume it."
        )
    return actual is not None


def _versioned(identity: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps({"version": _VERSION, **identity}))


def lock(path: Path, action: str, remedy: str) -> filelock.BaseFileLock:
    """Creates and locks a directory against other runs; process 0 does this for its whole run.

    It stays locked until it is released, this process ends or nothing refers to the lock.

    Args:
      path: the directory.
      action: what the other run does there, for the message.
      remedy: the remedy, for the message.

    Raises:
      ConfigError: another run has locked it.
    """
    file_lock = filelock.FileLock(path / LOCK, timeout=0, is_singleton=True)

    def acquire() -> None:
        path.mkdir(parents=True, exist_ok=True)
        try:
            with contextlib.suppress(NotImplementedError):  # by some network file systems
                file_lock.acquire()
        except filelock.Timeout:
            raise ConfigError(f"another process {action} in {path}; {remedy}.") from None

    distributed.from_first(acquire)
    return file_lock


class RunStore:
    """The directory of a run.

    Orbax writes each checkpoint whole or not at all, and keeps the latest and the best; a killed
    run resumes from the latest.

    Args:
      path: the directory.
      identity: what identifies the run; the directory of another run is refused.

    Raises:
      ConfigError: the directory holds another run, or something else, or another process trains
        there.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]):
        self.path = path
        remedy = "wait for it, or end it to resume from its latest checkpoint"
        self._lock = lock(path, "is training", remedy)
        claim(path, RUN, identity)
        with extra("train"):
            from orbax.checkpoint import v1 as ocp  # takes a second to import

        keep: Any = ocp.training.preservation_policies
        best = keep.BestN(n=1, get_metric_fn=_score, keep_checkpoints_without_metrics=False)
        self._checkpointer = ocp.training.Checkpointer(
            str(path.absolute() / "checkpoints"),
            preservation_policy=keep.AnyPreservationPolicy([keep.LatestN(1), best]),
            cleanup_tmp_directories=True,
        )

    @property
    def latest(self) -> int | None:
        """Updates of the latest checkpoint, or None."""
        checkpoint = self._checkpointer.latest
        return None if checkpoint is None else checkpoint.step

    @property
    def best(self) -> int | None:
        """Updates of the checkpoint with the highest acceptance, or None."""
        scored = [each for each in self._checkpointer.checkpoints if each.metrics]
        return max(scored, key=lambda each: _score(each.metrics)).step if scored else None

    @property
    def kept(self) -> str:
        """What remains on the disk after an error, for messages."""
        if self.latest is None:
            return f"the data made so far is kept in {self.path}."
        return f"the checkpoint of step {self.latest} is intact in {self.path}."

    def save(self, step: int, state: TrainState, acceptance: Mapping[str, float]) -> None:
        """Writes a checkpoint, and drops those that are neither the latest nor the best.

        Raises:
          OSError: it could not be written; earlier ones are unchanged.
        """
        try:
            self._checkpointer.save(step, dict(vars(state)), metrics=dict(acceptance), force=True)
        except Exception as error:  # TensorStore's errors have no common type
            raise OSError(
                f"the checkpoint of step {step} cannot be written ({first_line(error)}); "
                f"{self.kept}"
            ) from error

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state of a checkpoint, sharded like `like`.

        Raises:
          CheckpointError: it is damaged.
        """
        try:
            return TrainState(**self._checkpointer.load(step, dict(vars(like))))
        except Exception as error:
            raise CheckpointError(
                f"the checkpoint of step {step} in {self.path} is damaged "
                f"({first_line(error)}); delete {self.path / 'checkpoints' / str(step)} to resume "
                "from another."
            ) from error


def _score(metrics: Any) -> float:
    return (metrics["greedy"] + metrics["sampled"]) / 2
