"""A run on disk: its identity, its latest and its best weights, and its measurements."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import filelock
import jax

from spec_jax import distributed
from spec_jax.errors import CheckpointError, ConfigError, extra
from spec_jax.training.distil import TrainState

LOCK = "lock"
RUN = "run.json", "training run"
"""The file that identifies the run of a directory, and its name in messages."""
_VERSION = 1


def claim(path: Path, name: str, what: str, identity: Mapping[str, Any]) -> None:
    """Marks a locked directory with an identity, unless it has it already; raises as `holds`."""
    if not holds(path, name, what, identity):
        text = json.dumps(_versioned(identity), indent=2) + "\n"
        distributed.from_first(lambda: replace_text(path / name, text))


def holds(path: Path, name: str, what: str, identity: Mapping[str, Any]) -> bool:
    """Whether a directory already has this identity; otherwise it is new or empty.

    Args:
      path: the directory.
      name: the file in it that holds its identity.
      what: its name in messages.
      identity: the identity that it should have.

    Raises:
      ConfigError: it has another identity, or holds something else.
    """
    file, wanted = path / name, _versioned(identity)
    strange = path.exists() and not file.is_file()
    strange = strange and (not path.is_dir() or any(each.name != LOCK for each in path.iterdir()))
    found = json.loads(file.read_text()) if file.is_file() else None
    distributed.agree({f"what it finds in {path}": (strange, found)})
    if strange:
        raise ConfigError(
            f"{path} exists and holds no {what}; choose a new directory, nothing is overwritten."
        )
    if found is not None and found != wanted:
        differing = [
            f"{key} is {found.get(key)!r} there and {wanted.get(key)!r} here"
            for key in sorted({*found, *wanted})
            if found.get(key) != wanted.get(key)
        ]
        raise ConfigError(
            f"{path} holds another {what}: {'; '.join(differing)}. Choose a new directory, or ask "
            "for the same to go on with it."
        )
    return found is not None


def _versioned(identity: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps({"version": _VERSION, **identity}))


class RunStore:
    """The directory of a run.

    Orbax writes each checkpoint whole or not at all, and keeps the latest and the best; a killed
    run resumes from the latest.

    Args:
      path: the directory.
      identity: what identifies the run; a directory of another run is refused.

    Raises:
      ConfigError: the directory holds another run, or something else, or another process trains
        there.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]):
        self.path = path
        remedy = "wait for it, or end it to go on from its latest checkpoint"
        self._lock = lock(path, "is training", remedy)
        claim(path, *RUN, identity)
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
        found = self._checkpointer.latest
        return None if found is None else found.step

    @property
    def best(self) -> int | None:
        """Updates of the checkpoint with the highest acceptance, or None."""
        known = [each for each in self._checkpointer.checkpoints if each.metrics]
        return max(known, key=lambda each: _score(each.metrics)).step if known else None

    def save(self, step: int, state: TrainState, measured: Mapping[str, float]) -> None:
        """Writes a checkpoint, and drops those that are neither the latest nor the best.

        Raises:
          OSError: it could not be written; earlier ones are unchanged.
        """
        try:
            self._checkpointer.save(step, _tree(state), metrics=dict(measured), force=True)
        except Exception as error:  # what TensorStore raises has no common type
            raise OSError(
                f"the checkpoint of step {step} cannot be written ({_first_line(error)}); "
                f"{self.kept}"
            ) from error

    @property
    def kept(self) -> str:
        """What has been kept, for messages."""
        if self.latest is None:
            return f"the data made so far is kept in {self.path}."
        return f"that of step {self.latest} is intact in {self.path}."

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state of a checkpoint, sharded like `like`.

        Raises:
          CheckpointError: it is damaged.
        """
        try:
            found = self._checkpointer.load(step, _tree(like))
        except Exception as error:
            raise CheckpointError(
                f"the checkpoint of step {step} in {self.path} is damaged "
                f"({_first_line(error)}); delete {self.path / 'checkpoints' / str(step)} to go on "
                "from another."
            ) from error
        return TrainState(**found)

    def close(self) -> None:
        """Waits for what is being written."""
        self._checkpointer.close()


class History:
    """The measurements, one JSON object per line.

    Args:
      path: the file.
      until: the last step that counts; later lines, of a run that was killed, are dropped.
    """

    def __init__(self, path: Path, until: int):
        self.path = path
        lines = distributed.from_first(
            lambda: path.read_text().splitlines() if path.is_file() else []
        )
        self.entries = [entry for entry in map(_entry, lines) if entry and entry["step"] <= until]
        if lines and jax.process_index() == 0:
            replace_text(path, "".join(json.dumps(each) + "\n" for each in self.entries))

    def add(self, entry: dict[str, Any]) -> None:
        """Appends an entry."""
        self.entries.append(entry)
        if jax.process_index() == 0:
            with self.path.open("a") as file:
                file.write(json.dumps(entry) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def lock(path: Path, does: str, remedy: str) -> filelock.BaseFileLock:
    """Creates and locks a directory against other runs; process 0 does this for its whole run.

    It stays locked until it is released, this process ends or nothing refers to the lock.

    Args:
      path: the directory.
      does: what the other run does there, for the message.
      remedy: the remedy, for the message.

    Raises:
      ConfigError: another run has locked it.
    """
    found = filelock.FileLock(path / LOCK, timeout=0, is_singleton=True)

    def acquire() -> None:
        path.mkdir(parents=True, exist_ok=True)
        try:
            with contextlib.suppress(NotImplementedError):  # by some network file systems
                found.acquire()
        except filelock.Timeout:
            raise ConfigError(f"another process {does} in {path}; {remedy}.") from None

    distributed.from_first(acquire)
    return found


def _entry(line: str) -> dict[str, Any] | None:
    try:
        return json.loads(line)
    except ValueError:  # the line that was being written
        return None


def _score(metrics: Any) -> float:
    return (metrics["greedy"] + metrics["sampled"]) / 2


def _tree(state: TrainState) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
