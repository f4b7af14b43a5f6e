"""What it takes to draw a token, and which rare tokens are drawn, by the ways to do it.

    python -m benchmarks.draws

`argmax` draws nothing. CPUs draw by `native` code, other devices in `two levels`. The ways take
turns within each repeat.
"""

import functools
import os
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.sampling.draw import draw
from spec_jax.sampling.probabilities import draw_tokens

REPEATS = 40
TAIL = 0.00655
DRAWS = 2560


def gumbel(mode, keys, probs):
    """One race over the whole vocabulary, with JAX's own noise."""
    noise = jax.vmap(lambda key: jax.random.gumbel(key, probs.shape[1:], mode=mode))(keys)
    return jnp.argmax(jnp.log(probs) + noise, -1)


WAYS = {
    "argmax": lambda keys, probs: jnp.argmax(probs, -1),
    "Gumbel, low": functools.partial(gumbel, "low"),
    "Gumbel, high": functools.partial(gumbel, "high"),
    "two levels": draw,
    "native": lambda keys, probs: draw_tokens(keys[:, None], probs[:, None])[:, 0],
}


def seconds(ways, keys, probs):
    """Seconds of each way, one figure per repeat; the first call compiles and warms up."""
    jitted = {name: jax.jit(way) for name, way in ways.items()}
    taken = {name: [] for name in ways}
    for repeat in range(REPEATS + 1):
        for name, way in jitted.items():
            begin = time.perf_counter()
            jax.block_until_ready(way(keys, probs))
            if repeat:
                taken[name].append(time.perf_counter() - begin)
    return taken


def in_tail(way, vocab):
    """How many of `DRAWS` tokens are of a tail of equally rare ones."""
    weights = np.full(vocab, TAIL / (vocab - 1), np.float32)
    weights[0] = 1 - TAIL
    probs = jnp.broadcast_to(jnp.asarray(weights), (8, vocab))
    keys = jax.random.split(jax.random.key(0), (DRAWS // 8, 8))
    tokens = jax.jit(lambda keys: jax.lax.map(lambda keys: way(keys, probs), keys))(keys)
    return int((np.asarray(tokens) > 0).sum())


def main():
    print("| vocabulary | rows | way | milliseconds | two levels take of it |")
    print("| --- | --- | --- | --- | --- |")
    for vocab in (49_152, 131_072):
        for rows in (1, 8):
            keys = jax.random.split(jax.random.key(1), rows)
            probs = jax.nn.softmax(3 * jax.random.normal(jax.random.key(0), (rows, vocab)))
            taken = seconds(WAYS, keys, probs)
            for name, figures in taken.items():
                low, *_, high = sorted(1e3 * each for each in figures)
                middle = 1e3 * statistics.median(figures)
                pairs = zip(taken["two levels"], figures, strict=True)
                ratio = statistics.median(two / other for two, other in pairs)
                print(
                    f"| {vocab:,} | {rows} | {name} | {middle:.2f} ({low:.2f} - {high:.2f}) | "
                    f"{ratio:.3f} |"
                )
    vocab = 131_072
    print(f"\nof {DRAWS} draws {DRAWS * TAIL:.1f} are due to {vocab - 1:,} tokens of 5e-8 each")
    for name in list(WAYS)[1:]:
        print(f"{name}: {in_tail(WAYS[name], vocab)}", flush=True)


if __name__ == "__main__":
    main()
