"""A directory that appears when it is complete, and not before."""

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from spec_jax import distributed
from spec_jax.errors import CheckpointError

TERMINATED = 143
"""Exit code of a program that SIGTERM ended, as shells report it."""


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory to write into, which takes its name if nothing fails; all processes call it.

    Until then it lies beside `path` under the name `path` with `.partial` added. The next process
    removes the remains of a killed one.

    Args:
      path: a directory that does not exist yet, or is empty.

    Raises:
      CheckpointError: the path exists already or cannot be written, or another process writes it.
    """
    partial = path.with_name(f"{path.name}.partial")
    held: list[int] = []
    try:
        with _removed_at_sigterm(partial, held):
            distributed.from_first(lambda: _claim(path, partial, held))
            yield partial
            distributed.from_first(lambda: _publish(path, partial))
    except BaseException as error:
        if held:
            _remove(partial)
        if isinstance(error, OSError | SafetensorError):
            raise CheckpointError(f"{path} cannot be written: {error}.") from error
        raise
    finally:
        for each in held:
            os.close(each)


@contextlib.contextmanager
def _removed_at_sigterm(partial: Path, held: list[int]) -> Iterator[None]:
    """SIGTERM removes the directory, if this process holds it, and ends the process.

    An exception would be lost in the callbacks that JAX gives to the garbage collector. One process
    of several may wait for the others in XLA, where Python handles no signal: SIGTERM ends it.
    """
    in_main = threading.current_thread() is threading.main_thread()
    is_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not (in_main and is_default and distributed.process()[1] == 1):
        yield
        return

    def end(*_: object) -> None:
        if held:
            _remove(partial)
        os._exit(TERMINATED)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def refuse_existing(path: Path) -> None:
    """Refuses a path that is taken.

    Raises:
      CheckpointError: the path exists and is not an empty directory.
    """
    if os.path.lexists(path) and (path.is_symlink() or not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} exists; choose a new directory, nothing is overwritten.")


def _claim(path: Path, partial: Path, held: list[int]) -> None:
    """Makes the directory and locks it; appends its descriptor to `held`."""
    refuse_existing(path)
    partial.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"{path} is being written by another process; wait for it, or choose another."
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise  # some shared storage has no locks
        # Another process may have given the directory its final name in between.
        if not partial.exists() or not os.path.samestat(os.fstat(descriptor), partial.stat()):
            raise CheckpointError(f"{path} was written in the meantime; nothing is overwritten.")
    except BaseException:
        os.close(descriptor)
        raise
    held.append(descriptor)
    for each in partial.iterdir():
        shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()


def _remove(partial: Path) -> None:
    """Removes the directory; Orbax's threads may still write for a moment after an error."""
    last_try = time.monotonic() + 5
    missing = 0
    while missing < 5 and time.monotonic() < last_try:
        missing = 0 if partial.exists() else missing + 1
        shutil.rmtree(partial, ignore_errors=True)
        time.sleep(0.05)


def _publish(path: Path, partial: Path) -> None:
    """Gives the directory its name once its contents are on the disk."""
    for folder, _, files in os.walk(partial):
        for name in (*(os.path.join(folder, file) for file in files), folder):
            descriptor = os.open(name, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    partial.rename(path)
