"""Programs of HumanEval: right ones pass; wrong, endless and greedy ones do not, and end."""

import os
import time

import pytest

from spec_jax.errors import ConfigError
from spec_jax.evaluation import execution
from spec_jax.evaluation.execution import check, check_all, check_itself

PROBLEM = {
    "task_id": "Test/0",
    "prompt": "def twice(x):\n",
    "entry_point": "twice",
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(3) == 6\n",
}


def test_right_and_wrong_programs_in_order():
    seen = []
    completions = ["    return x + x\n", "    return x\n", "    return 2 *\n", "    return 2 * x\n"]
    found = check_all([(PROBLEM, each) for each in completions], seen.append)
    assert [each.passed for each in found] == [True, False, False, True]
    assert found[0].result == "passed" and found[2].result.startswith("failed: ")
    assert seen[-1] == "running programs: 4 of 4"


@pytest.mark.parametrize(
    "loop",
    [
        "    while True:\n        pass\n",
        # The checker's own alarm is an exception, which this one catches.
        "    import time\n    while True:\n        try:\n            time.sleep(9)\n"
        "        except BaseException:\n            pass\n",
    ],
    ids=["endless", "that cannot be interrupted"],
)
def test_an_endless_program_is_ended(monkeypatch, loop):
    monkeypatch.setattr(execution, "SECONDS", 0.5)
    begin = time.monotonic()
    assert check(PROBLEM, loop) == (False, "timed out")
    assert time.monotonic() - begin < 15


def test_memory_is_bounded():
    """Ten GiB are refused, and so are many pieces, each of which would fit."""
    assert check(PROBLEM, "    y = bytearray(10 << 30)\n    return 2 * x\n") == (False, "failed: ")
    pieces = "    y = [bytearray(64 << 20) for _ in range(40)]\n    return 2 * x\n"
    assert not check(PROBLEM, pieces).passed
    assert check(PROBLEM, "    y = bytearray(64 << 20)\n    return 2 * x\n").passed


def test_a_program_has_neither_the_environment_nor_the_folder(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "secret")
    here = os.getcwd()
    program = (
        "    import os, sys\n"
        "    assert 'MY_TOKEN' not in os.environ and 'spec_jax' not in sys.modules\n"
        f"    open('left behind', 'w').write('x'); assert {here!r} not in sys.path\n"
        "    return 2 * x\n"
    )
    assert check(PROBLEM, program) == (True, "passed")
    assert not os.path.exists("left behind")


def test_a_file_of_any_size_is_not_written():
    program = "    open('large', 'wb').write(bytes(64 << 20))\n    return 2 * x\n"
    assert not check(PROBLEM, program).passed


def test_what_takes_too_long_in_all_is_killed(monkeypatch):
    monkeypatch.setattr(execution, "STARTING_SECONDS", -execution.SECONDS + 0.01)
    assert check(PROBLEM, "    return 2 * x\n") == (False, "timed out")


def test_a_checker_that_cannot_run_is_no_verdict_on_a_model(monkeypatch):
    check_itself(PROBLEM)
    monkeypatch.setattr(execution, "LIMITS", {"RLIMIT_AS": 1 << 20})
    with pytest.raises(ConfigError, match=r"checker cannot run here: the solution of Test/0"):
        check_itself(PROBLEM)
