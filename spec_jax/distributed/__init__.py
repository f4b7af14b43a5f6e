"""Several processes as one: start-up, and agreement on what they are about to do.

Every process runs the same program on the same inputs. JAX finds its peers on TPU pods, under
SLURM and on Kubernetes; elsewhere the variables JAX_COORDINATOR_ADDRESS (host:port of process 0),
JAX_NUM_PROCESSES and JAX_PROCESS_ID say where they are.
"""

import atexit
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import distributed as jax_distributed
from jax.experimental import multihost_utils

from spec_jax.distributed.roll_call import call_roll
from spec_jax.distributed.watch import Watch, end_process
from spec_jax.errors import (
    BenchmarkError,
    CheckpointError,
    ConfigError,
    DisagreementError,
    TrainingError,
)
from spec_jax.sharding import Layout

T = TypeVar("T")

JOIN_SECONDS = 60
"""The longest wait for other processes; SPEC_JAX_JOIN_SECONDS, if it is set, comes first."""

HEARTBEAT_SECONDS = 60
"""After this long JAX aborts a process whose peers give no sign of life; `Watch` ends it sooner."""

SHUTDOWN_SECONDS = 10
"""The longest wait of a process that has ended for the others to end."""

_PACKAGES = (
    *("spec-jax", "jax", "jaxlib", "flax", "numpy"),
    *("jinja2", "llguidance", "tokenizers", "transformers"),  # which decide on a host
)
_SHOWN = 224
"""Bytes of a fact that travel besides its checksum."""
_PASSED_ON = {
    kind.__name__: kind
    for kind in (BenchmarkError, ConfigError, CheckpointError, TrainingError, OSError)
}
"""Errors of process 0 that are those of the whole run."""


def start(layout: Layout) -> None:
    """Makes JAX's devices those of a layout: its platform, its processes, emulated devices.

    Call it before anything else uses JAX's devices. Once they are there it only compares.

    Raises:
      ConfigError: the processes are fewer or more than the layout's, or cannot be found.
    """
    if layout.platform == "cpu":
        _emulate(layout)
    given = _number("JAX_NUM_PROCESSES")
    if given not in (None, layout.processes):
        raise ConfigError(
            f"layout {layout.name} is for {layout.processes} processes, and JAX_NUM_PROCESSES is "
            f"{given}; start as many as the layout says."
        )
    if layout.processes > 1 and not jax.distributed.is_initialized():
        _join(layout)
    if jax.process_count() != layout.processes:
        raise ConfigError(
            f"layout {layout.name} is for {layout.processes} processes, and there are "
            f"{jax.process_count()}; start as many as the layout says."
        )


def _emulate(layout: Layout) -> None:
    try:
        jax.config.update("jax_platforms", "cpu")
        if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
            jax.config.update("jax_num_cpu_devices", layout.size // layout.processes)
    except RuntimeError:  # the devices are there already; the layout may fit them as they are
        pass


def _join(layout: Layout) -> None:
    address, number = os.environ.get("JAX_COORDINATOR_ADDRESS"), _number("JAX_PROCESS_ID")
    seconds = _number("SPEC_JAX_JOIN_SECONDS") or JOIN_SECONDS
    if address is not None and number is not None and number < layout.processes:
        call_roll(address, number, layout.processes, seconds)
    # It would hold SIGTERM back, for a program that asks it whether there was one.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator_address=address,
            num_processes=_number("JAX_NUM_PROCESSES"),
            process_id=number,
            initialization_timeout=seconds,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"layout {layout.name} is for {layout.processes} processes, and this one cannot join "
            f"them ({error}). Outside of TPU pods, SLURM and Kubernetes, set "
            "JAX_COORDINATOR_ADDRESS to host:port of process 0, JAX_NUM_PROCESSES to "
            f"{layout.processes} and JAX_PROCESS_ID to this process's number from 0."
        ) from error
    jax_state: Any = jax_distributed.global_state  # its store has no public name
    watch = Watch(
        jax_state.client,
        jax_state.process_id,
        layout.processes,
        end_process,
        address=jax_state.coordinator_address,
    )
    atexit.register(watch.leave)  # which comes before JAX's own exit, registered earlier


def _number(variable: str) -> int | None:
    text = os.environ.get(variable)
    if text is not None and not text.isdecimal():
        raise ConfigError(f"{variable} is {text!r}; give a whole number.")
    return None if text is None else int(text)


def process() -> tuple[int, int]:
    """This process's number, and how many there are; starts no device."""
    if not jax.distributed.is_initialized():
        return 0, 1
    return jax.process_index(), jax.process_count()


def gather(value: T) -> list[T]:
    """What JSON can hold, of every process, in the order of their numbers; all call it together."""
    if process()[1] == 1:
        return [value]
    data = json.dumps(value).encode()
    longest = multihost_utils.process_allgather(np.uint32(len(data))).max()
    # JSON ignores spaces at its end; powers of two leave few shapes to compile.
    padded = data.ljust(1 << int(longest - 1).bit_length())
    rows = multihost_utils.process_allgather(np.frombuffer(padded, np.uint8))
    return [json.loads(np.asarray(row).tobytes()) for row in rows]


def from_first(act: Callable[[], T]) -> T:
    """Lets process 0 act alone, and waits; all call it together.

    Args:
      act: what depends on the host, such as on its disk. It returns what JSON can hold.

    Returns:
      What it returned in process 0.

    Raises:
      ConfigError, CheckpointError, TrainingError, OSError: in every process, if it raised that in
        process 0.
    """
    number, count = process()
    if count == 1:
        return act()
    value: Any = None
    kind = failure = None
    if number == 0:
        try:
            value = act()
        except tuple(_PASSED_ON.values()) as error:
            kind = next(name for name, each in _PASSED_ON.items() if isinstance(error, each))
            failure = error
    value, kind, message = gather((value, kind, str(failure)))[0]
    if kind is not None:
        raise failure or _PASSED_ON[kind](message)
    return value


def agree(facts: Mapping[str, object]) -> None:
    """Checks that all processes are about to do the same; what differs would make them hang.

    Versions are compared besides the facts.

    Args:
      facts: what to compare by its `repr`, under names to call it in messages.

    Raises:
      DisagreementError: in every process, if one differs; it names process and fact.
    """
    if process()[1] == 1:
        return
    texts = {f"the version of {name}": importlib.metadata.version(name) for name in _PACKAGES}
    texts |= {name: repr(value) for name, value in facts.items()}
    mine = np.stack([_row(text) for text in texts.values()])
    everyone = np.asarray(multihost_utils.process_allgather(mine))
    for name, column in zip(texts, everyone.swapaxes(0, 1), strict=True):
        rows = [row.tobytes() for row in column]
        # Most of them are right; where there is no majority, the first is.
        right = max(rows, key=rows.count)
        for number, row in enumerate(rows):
            if row != right:
                seen, expected = _shown(row), _shown(right)
                detail = f": {seen} instead of {expected}" if seen != expected else ""
                raise DisagreementError(
                    f"process {number} of {len(rows)} differs from the rest in {name}{detail}. "
                    "Start every process with the same command, files and packages."
                )


def to_host(tree: Any) -> Any:
    """NumPy copies of arrays; every process gets all of each, wherever its parts lie."""

    def whole(array: jax.Array) -> np.ndarray:
        if array.is_fully_addressable or array.is_fully_replicated:
            return np.asarray(array)
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))

    return jax.tree.map(whole, tree)


def _row(text: str) -> np.ndarray:
    """A fact's checksum and beginning, in as many bytes for every fact."""
    data = text.encode(errors="backslashreplace")
    row = hashlib.sha256(data).digest() + data[:_SHOWN].ljust(_SHOWN, b"\0")
    return np.frombuffer(row, np.uint8)


def _shown(row: bytes) -> str:
    return row[hashlib.sha256().digest_size :].rstrip(b"\0").decode(errors="replace")
