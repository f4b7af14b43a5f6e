"""Several processes as one: start-up, and checks that they agree.

Every process runs the same program on the same inputs. JAX finds its peers on TPU pods, under
SLURM and on Kubernetes; elsewhere the variables JAX_COORDINATOR_ADDRESS (host:port of process 0),
JAX_NUM_PROCESSES and JAX_PROCESS_ID say where they are.
"""

import atexit
import functools
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

from spec_jax.config.other_names import no_attribute
from spec_jax.distributed.messages import Messages
from spec_jax.distributed.roll_call import call_roll
from spec_jax.distributed.watch import Watch, end_process
from spec_jax.errors import (
    BenchmarkError,
    CheckpointError,
    ConfigError,
    DisagreementError,
    JoinError,
    TrainingError,
)
from spec_jax.sharding import Layout

T = TypeVar("T")

JOIN_SECONDS, LOCAL_JOIN_SECONDS = 300, 60
"""The longest wait for other processes, and for ones of this machine alone.

Hosts of a pod start at different speeds. SPEC_JAX_JOIN_SECONDS overrides both.
"""

HEARTBEAT_SECONDS = 60
"""The time after which JAX aborts a process with silent peers; `Watch` ends it sooner."""

SHUTDOWN_SECONDS = 10
"""The longest wait of a finished process for the others."""

_LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_PACKAGES = (
    *("spec-jax", "jax", "jaxlib", "flax", "numpy"),
    *("jinja2", "llguidance", "tokenizers", "transformers"),  # whose results hosts decide by
)
_MAX_FACT = 224
"""Bytes of a fact that are sent besides its checksum."""
_SHARED_ERRORS = {
    kind.__name__: kind
    for kind in (BenchmarkError, ConfigError, CheckpointError, TrainingError, OSError)
}
"""Errors of process 0 that end the run in all processes."""


def __getattr__(name: str) -> Any:
    raise no_attribute(__name__, name)  # scripts for vLLM import names from here


def start(layout: Layout) -> None:
    """Makes JAX use a layout's platform, processes and emulated devices.

    Call it before anything else uses JAX's devices; later it only compares.

    Raises:
      ConfigError: the processes are fewer or more than the layout's.
      JoinError: some did not join in time.
    """
    if layout.platform == "cpu":
        _emulate(layout)
    num_processes = _number("JAX_NUM_PROCESSES")
    if num_processes not in (None, layout.processes):
        raise ConfigError(
            f"layout {layout.name} is for {layout.processes} processes, and JAX_NUM_PROCESSES is "
            f"{num_processes}; start as many as the layout says."
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
    is_local = address is not None and address.rpartition(":")[0] in _LOCAL_HOSTS
    default = LOCAL_JOIN_SECONDS if is_local else JOIN_SECONDS
    seconds = _number("SPEC_JAX_JOIN_SECONDS") or default
    if address is not None and number is not None and number < layout.processes:
        call_roll(address, number, layout.processes, seconds)
    # It would hold SIGTERM back, for programs that poll for it.
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
        # JAX raises the first for what it is told, the second if others are late.
        kind = ConfigError if isinstance(error, ValueError) else JoinError
        raise kind(
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
        raise ConfigError(f"{variable} is {text!r}; give an integer.")
    return None if text is None else int(text)


def process() -> tuple[int, int]:
    """This process's number, and how many there are; starts no device."""
    if not jax.distributed.is_initialized():
        return 0, 1
    return jax.process_index(), jax.process_count()


@functools.cache
def message_channel() -> Messages:
    """What process 0 sends to the others and they receive, from the first message on."""
    jax_state: Any = jax_distributed.global_state
    return Messages(jax_state.client, *process())


def gather(value: T) -> list[T]:
    """The values of all processes, which JSON can hold, in order; all call it together."""
    if process()[1] == 1:
        return [value]
    data = json.dumps(value).encode()
    longest = multihost_utils.process_allgather(np.uint32(len(data))).max()
    # JSON ignores spaces at its end; powers of two leave few shapes to compile.
    padded = data.ljust(1 << int(longest - 1).bit_length())
    rows = multihost_utils.process_allgather(np.frombuffer(padded, np.uint8))
    return [json.loads(np.asarray(row).tobytes()) for row in rows]


def from_first(act: Callable[[], T]) -> T:
    """Lets process 0 act for all; all call it together.

    Args:
      act: depends on the host, for example on its disk. Its result must be valid JSON.

    Returns:
      The result of process 0.

    Raises:
      ConfigError, CheckpointError, TrainingError, OSError: in every process, if process 0 raised
        it.
    """
    number, count = process()
    if count == 1:
        return act()
    value: Any = None
    kind = failure = None
    if number == 0:
        try:
            value = act()
        except tuple(_SHARED_ERRORS.values()) as error:
            kind = next(name for name, each in _SHARED_ERRORS.items() if isinstance(error, each))
            failure = error
    value, kind, message = gather((value, kind, str(failure)))[0]
    if kind is not None:
        raise failure or _SHARED_ERRORS[kind](message)
    return value


def agree(consensus: Mapping[str, object]) -> None:
    """Checks that all processes are about to do the same; otherwise they would hang.

    Package versions are compared, too.

    Args:
      consensus: name in messages -> value, which is compared by its `repr`.

    Raises:
      DisagreementError: in every process, if one differs; it names the process and the value.
    """
    if process()[1] == 1:
        return
    texts = {f"the version of {name}": importlib.metadata.version(name) for name in _PACKAGES}
    texts |= {name: repr(value) for name, value in consensus.items()}
    local_rows = np.stack([_row(text) for text in texts.values()])
    all_rows = np.asarray(multihost_utils.process_allgather(local_rows))
    for name, column in zip(texts, all_rows.swapaxes(0, 1), strict=True):
        rows = [row.tobytes() for row in column]
        # The majority is right; without one, the first process.
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
    """NumPy copies of arrays; every process gets all parts of each."""

    def gathered(array: jax.Array) -> np.ndarray:
        if array.is_fully_addressable or array.is_fully_replicated:
            return np.asarray(array)
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))

    return jax.tree.map(gathered, tree)


def _row(text: str) -> np.ndarray:
    """A fact's checksum and beginning, of the same size for every fact."""
    data = text.encode(errors="backslashreplace")
    row = hashlib.sha256(data).digest() + data[:_MAX_FACT].ljust(_MAX_FACT, b"\0")
    return np.frombuffer(row, np.uint8)


def _shown(row: bytes) -> str:
    return row[hashlib.sha256().digest_size :].rstrip(b"\0").decode(errors="replace")
