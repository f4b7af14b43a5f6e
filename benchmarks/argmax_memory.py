"""Resident memory that compiled programs with an argmax leave behind: JAX's, and the library's.

    python -m benchmarks.argmax_memory jax
    python -m benchmarks.argmax_memory own

Four times a hundred programs are compiled and dropped. Linux only.
"""

import ctypes
import gc
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from spec_jax.sampling.draw import argmax

ARGMAX = {"jax": lambda x: jnp.argmax(x, -1), "own": argmax}


def resident() -> float:
    """MiB of this process in memory, after what is free was given back to the system (Linux)."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def main() -> None:
    which = ARGMAX[sys.argv[1]]
    for programs in (100, 200, 300, 400):
        for _ in range(100):
            jax.jit(lambda x: which(x) + 1).lower(jnp.ones((2, 3))).compile()
        print(f"{programs} programs: {resident():.2f} MiB", flush=True)


if __name__ == "__main__":
    main()
