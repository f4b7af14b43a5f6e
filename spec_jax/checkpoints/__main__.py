"""`python -m spec_jax.checkpoints fetch RECIPE`: later runs then need no network.

Prints the path of the model on standard output, and progress on standard error.
"""

import sys

from spec_jax.checkpoints.reference import locate
from spec_jax.errors import SpecJaxError, printable

USAGE = "usage: python -m spec_jax.checkpoints fetch REFERENCE..."


def main(arguments: list[str]) -> int:
    """Fetches every reference; returns the exit code."""
    if len(arguments) < 2 or arguments[0] != "fetch":
        sys.stderr.write(USAGE + "\n")
        return 2
    try:
        for reference in arguments[1:]:
            _, path = locate(
                reference, lambda line: sys.stderr.write(f"spec-jax: {printable(line)}\n")
            )
            sys.stdout.write(f"{path}\n")
    except SpecJaxError as error:
        sys.stderr.write(f"spec-jax: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
