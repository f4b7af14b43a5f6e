"""What calls cost: v(n), a target call that scores n tokens, and c, a step of the draft.

With them the speed-up of a round of K drafted tokens is predicted: E / (K c + v(K + 1)), where E is
the tokens that a target call gives (Leviathan et al. 2023, arXiv 2211.17192, theorem 3.8, with
v = 1). What is measured beside it is the loop's efficiency.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.benchmarking.results import Costs, Step
from spec_jax.benchmarking.systems import Ours
from spec_jax.drafters.base import Drafter
from spec_jax.drafters.early_exit import EarlyExit
from spec_jax.models.model import Model
from spec_jax.sampling.probabilities import likeliest

STEPS = 16
"""Steps of one timed call, which are a loop on the device."""
CAPACITY = 256
"""KV slots of the caches: about as many as short prompts and answers take."""
TARGET = "target"
STREAMED = 2**28
"""Bytes that each reading of memory is timed with: more than caches hold."""


def greedy_steps(
    model: Model,
    rows: int,
    steps: int = STEPS,
    *,
    batch: int = 1,
    layers: int | None = None,
    capacity: int = CAPACITY,
) -> Callable[[], float]:
    """A function that times greedy steps, each scoring `rows` tokens, in a loop on the device.

    With `layers` a step computes this many of the first blocks alone, and the head.
    """

    def run(model: Model, cache, tokens):
        def step(_, carry):
            cache, tokens = carry
            if layers is None:
                logits, _, cache = model.score(tokens, cache)
                assert logits is not None
            else:
                x, cache = model.run_first_layers(tokens, cache, layers)
                logits = model.logits(x)
            cache = cache.with_lengths(cache.lengths + 1)
            return cache, likeliest(logits, model.placement)

        return jax.lax.fori_loop(0, steps, step, (cache, tokens))

    tokens = jnp.ones((batch, rows), jnp.int32)
    fresh = model.new_cache(batch, capacity)
    compiled = model.jit(run, donate_argnums=1).lower(model, fresh, tokens).compile()

    def seconds_per_step() -> float:
        cache = jax.block_until_ready(model.new_cache(batch, capacity))
        begin = time.perf_counter()
        jax.block_until_ready(compiled(model, cache, tokens))
        return (time.perf_counter() - begin) / steps

    return seconds_per_step


def draft_step(drafter: Drafter, batch: int = 1) -> Callable[[], float] | None:
    """A function that times a draft step; None if drafting runs no model on the device."""
    model = getattr(drafter, "model", None)
    if not isinstance(model, Model):
        return None
    layers = drafter.layers if isinstance(drafter, EarlyExit) else None
    return greedy_steps(model, 1, batch=batch, layers=layers)


def weight_bytes(model: Model) -> int:
    """Bytes of all weights."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))


def streaming_bandwidth(size: int = STREAMED) -> float:
    """Bytes a second at which all threads together read the host's memory; the best of five."""
    threads = os.cpu_count() or 1
    data = np.ones(size // 4, np.float32)
    parts, best = np.array_split(data, threads), 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            begin = time.perf_counter()
            list(pool.map(np.maximum.reduce, parts))  # quicker than sums
            best = max(best, data.nbytes / (time.perf_counter() - begin))
    return best


def measure_costs(runners: Sequence[Ours], batch: int, repeats: int) -> Costs:
    """Times the target's calls of all widths in use, and the draft steps; they take turns."""
    target = runners[0].llm.engine.target
    widths = sorted({1, *(each.system.num_speculative_tokens + 1 for each in runners)})
    timers: dict[tuple[str, int], Callable[[], float]] = {
        (TARGET, width): greedy_steps(target, width, batch=batch) for width in widths
    }
    drafters = {each.system.method: each.llm.engine.drafter for each in runners}
    for method, drafter in drafters.items():
        if timer := draft_step(drafter, batch):
            timers[method, 1] = timer
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in timers}
    for repeat in range(repeats + 1):
        for key, timer in timers.items():
            taken = timer()
            if repeat:  # the first pass warms up
                seconds[key].append(taken)
    return Costs(
        batch_size=batch,
        weight_bytes=weight_bytes(target),
        streaming=streaming_bandwidth() if target.platform == "cpu" else None,
        steps=tuple(
            Step(name=name, width=width, seconds=tuple(each))
            for (name, width), each in seconds.items()
        ),
    )
