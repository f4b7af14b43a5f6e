"""`python -m spec_jax` is the command `spec-jax`."""

import sys

from spec_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
