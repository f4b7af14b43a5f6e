"""The command `spec-jax`, also as `python -m spec_jax`. Imports next to nothing itself."""

import contextlib
import gc
import os
import signal
import sys

INTERRUPTED = 130
"""Exit code of a program that SIGINT ended, as shells report it."""


def main() -> int:
    """Runs the command line; Ctrl-C ends it quietly, even before anything is imported."""
    # An exception in the middle of an import may be swallowed there, or leave half a module.
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeded:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    # Importing and tracing make millions of small objects, few of them in cycles. Looking for these
    # as often as Python does takes a sixth of the time until the first token.
    gc.set_threshold(100_000, 20, 100)
    from spec_jax.cli import main as run

    with contextlib.suppress(KeyboardInterrupt):
        if heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run()
        if heeded:  # JAX takes its time to end
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        return code
    return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
