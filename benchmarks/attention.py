"""What a decoding step and a prompt cost by the text's length and the cache's, with the demo model.

    python -m benchmarks.attention             # about five minutes on two idle cores

Steps of one token run in a loop on the device, as decoding does, in caches of several sizes that
hold texts of several lengths; backends take turns within each repeat. Medians and ranges.
"""

import argparse
import dataclasses
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

from spec_jax import checkpoints
from spec_jax.models.attention import BACKENDS
from spec_jax.models.prefill import prefill

RECIPE = str(Path(__file__).resolve().parents[1] / "checkpoints" / "smollm2-135m-instruct.toml")
STEPS, BLOCK = 8, 512
CASES = [(256, 200), (8192, 200), (8192, 4000), (8192, 8000)]
"""Slots of the cache, and how many of them are used."""


def spread(values, digits=2):
    middle = statistics.median(values)
    return f"{middle:.{digits}f} ({min(values):.{digits}f} - {max(values):.{digits}f})"


def steps(model, slots):
    """A function that times greedy steps behind a text of some length."""

    def run(model, cache, token):
        def step(_, carry):
            cache, token = carry
            logits, cache = model.score(token, cache)
            return cache.with_lengths(cache.lengths + 1), jnp.argmax(logits, -1).astype(jnp.int32)

        return jax.lax.fori_loop(0, STEPS, step, (cache, token))

    token, cache = jnp.ones((1, 1), jnp.int32), model.new_cache(1, slots)
    compiled = model.jit(run, donate_argnums=1).lower(model, cache, token).compile()

    def timed(used):
        nonlocal cache
        cache = jax.block_until_ready(cache.with_lengths(jnp.full((1,), used, jnp.int32)))
        begin = time.perf_counter()
        cache, _ = jax.block_until_ready(compiled(model, cache, token))
        return 1e3 * (time.perf_counter() - begin) / STEPS

    return timed


def prompts(model, slots):
    """A function that times the reading of a prompt, and what the program takes beside it."""

    def run(model, tokens, lengths):
        cache = model.new_cache(*tokens.shape, headroom=BLOCK)
        return prefill(model, tokens, lengths - 1, cache, BLOCK)

    tokens, lengths = jnp.ones((1, slots), jnp.int32), jnp.zeros((1,), jnp.int32)
    compiled = model.jit(run).lower(model, tokens, lengths).compile()

    def timed(used):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(model, tokens, lengths + used))
        return time.perf_counter() - begin

    return timed, compiled.memory_analysis().temp_size_in_bytes / 2**20


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    args = parser.parse_args()
    model = checkpoints.load(RECIPE, dtype=args.dtype).model
    models = {name: dataclasses.replace(model, attention=name) for name in BACKENDS}
    print(f"A step of one token, {args.dtype}, milliseconds:\n")
    print("| slots | used | " + " | ".join(models) + " |\n| --- | --- |" + " --- |" * len(models))
    timers = {
        (name, slots): steps(each, slots)
        for name, each in models.items()
        for slots in {slots for slots, _ in CASES}
    }
    times = {(name, *case): [] for name in models for case in CASES}
    for repeat in range(args.repeats + 1):
        for name, slots, used in times:
            milliseconds = timers[name, slots](used)
            if repeat:  # the first warms up
                times[name, slots, used].append(milliseconds)
    for slots, used in CASES:
        cells = (spread(times[name, slots, used]) for name in models)
        print(f"| {slots} | {used} | " + " | ".join(cells) + " |")
    for name in models:
        ratios = [
            long / short
            for long, short in zip(times[name, 8192, 200], times[name, 256, 200], strict=True)
        ]
        print(f"\n{name}: 200 tokens in 8,192 slots against 200 in 256: {spread(ratios)}")
    print(f"\nReading a prompt of 4,000 tokens into 8,704 slots, {args.dtype}:\n")
    print("| backend | seconds | MiB beside arguments and results |\n| --- | --- | --- |")
    readers = {name: prompts(each, 8704) for name, each in models.items()}
    seconds = {name: [timed(4000) for _ in range(3)][1:] for name, (timed, _) in readers.items()}
    for name, (_, temporary) in readers.items():
        print(f"| {name} | {spread(seconds[name], 1)} | {temporary:.0f} |")


if __name__ == "__main__":
    main()
