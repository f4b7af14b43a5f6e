"""Compiles and drops the same programs again and again: resident memory should stay.

    python -m benchmarks.dropped_programs [TIMES]          # three minutes on two cores

It shows whether the compiler, or the cache on the disk, keeps something of a dropped program.
`soak.py` measures what is left where programs of many sizes come and go beside kept ones.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from benchmarks.soak import resident
from spec_jax import LLM, SamplingParams, host_memory
from tests.checkpoints.tiny import CONFIG, llama_tensors, write_directory

EVERY = 5


def main() -> None:
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["SPEC_JAX_CACHE"] = f"{scratch}/cache"
        path = write_directory(Path(scratch) / "tiny", CONFIG, llama_tensors(CONFIG))
        llm = LLM(str(path), speculative_config={"method": "ngram", "num_speculative_tokens": 3})
        params = SamplingParams(max_tokens=8, temperature=1.0, top_p=0.9)
        for kind in ("read from the disk", "compiled"):
            jax.config.update("jax_enable_compilation_cache", kind != "compiled")
            for done in range(1, times + 1):
                llm.generate(["the inn"], params)
                llm.engine.compiler.clear()
                host_memory.give_back()
                if done % EVERY == 0:
                    print(f"{kind}, {done} times: {resident() / 2**20:.1f} MiB", flush=True)


if __name__ == "__main__":
    main()
