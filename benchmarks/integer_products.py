"""What the products of a decoding step cost by rows, with activations in float32 and in 8 bits.

    python -m benchmarks.integer_products       # two minutes on two idle cores
    python -m benchmarks.integer_products model.gguf

All products of a step: with random weights in the shapes of two models and in 4 bits, a scale and a
minimum for 32 inputs, or with each matrix of a GGUF file; milliseconds, the best of 10 calls of 4
steps, both kinds in turns.
Beside them stands the time of one pass over as many bytes by NumPy's `max`, on as many threads as
there are CPUs. `SPEC_JAX_NATIVE` chooses another kind of processor.
"""

import concurrent.futures
import dataclasses
import itertools
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.methods import show
from spec_jax import checkpoints
from spec_jax.checkpoints.packing import Packing
from spec_jax.kernels import PackedWeight, Quantized, native, products

SHAPES = {
    # layers, embed, heads, key heads, head dim, mlp, vocabulary
    "SmolLM2-135M": (30, 576, 9, 3, 64, 1536, 49_152),
    "Qwen2.5-Coder-1.5B": (28, 1536, 12, 2, 128, 8960, 151_936),
}
ROWS = (1, 2, 3, 4, 5, 6, 8, 16)
ACTIVATIONS = ("float32", "int8")
STEPS, TURNS = 4, 10


def random_weight(random, inputs, outputs):
    values = random.integers(0, 16, (outputs, inputs), np.uint8)
    scales = np.full((outputs, inputs // 32), 0.01, np.float16)
    return PackedWeight.of(Quantized(values, scales, np.float16(-7.5) * scales, 4))


def step_weights(shape):
    """The weights of each call: q, k and v share one, and so do gate and up."""
    layers, embed, heads, kv_heads, dim, mlp, vocabulary = shape
    random = np.random.default_rng(0)
    calls = [
        (embed, (heads * dim, kv_heads * dim, kv_heads * dim)),
        (heads * dim, (embed,)),
        (embed, (mlp, mlp)),
        (mlp, (embed,)),
    ]
    layer = [[random_weight(random, inputs, each) for each in outputs] for inputs, outputs in calls]
    copies = [jax.tree.map(jnp.copy, layer) for _ in range(layers)]
    return [*itertools.chain(*copies), [random_weight(random, embed, vocabulary)]]


def forms(name):
    """The weights of each call, by the activations that they meet."""
    if name in SHAPES:  # both kinds of products read one layout of 4 bits
        weights = step_weights(SHAPES[name])
        return {
            activations: [
                [dataclasses.replace(weight, activations=activations) for weight in call]
                for call in weights
            ]
            for activations in ACTIVATIONS
        }
    loaded = {
        activations: checkpoints.load(Path(name), packing=Packing("gguf", True, activations))
        for activations in ACTIVATIONS
    }
    return {
        activations: [
            [weight] for weight in each.model.weights.values() if isinstance(weight, PackedWeight)
        ]
        for activations, each in loaded.items()
    }


def nbytes(weights):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(weights))


@jax.jit
def steps(x, weights):
    """Some steps, whose products wait for one another; one call of them passes the weights once."""

    def step(_, x):
        for call in weights:
            x += 1e-6 * products(x[:, : call[0].shape[0]], call)[0][:, :1]
        return x

    return jax.lax.fori_loop(0, STEPS, step, x)


def seconds(run, *arguments):
    begin = time.perf_counter()
    jax.block_until_ready(run(*arguments))
    return time.perf_counter() - begin


def streaming(nbytes, threads):
    """Seconds to read bytes once, each thread its part."""
    parts = [np.ones(nbytes // threads // 4, np.uint32) for _ in range(threads)]
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return np.median([seconds(lambda: list(pool.map(np.max, parts))) for _ in range(9)])


def main():
    print(f"native code: {native.description()}, {os.cpu_count()} CPUs\n")
    for name in sys.argv[1:] or SHAPES:
        weights = forms(name)
        for form, calls in weights.items():
            stream = 1e3 * streaming(nbytes(calls), os.cpu_count())
            megabytes = nbytes(calls) / 1e6
            print(f"{name}, {form}: {megabytes:.0f} MB; {stream:.1f} ms to read as many bytes\n")
        show("activations", *map(str, ROWS))
        show(*["---"] * (1 + len(ROWS)))
        width = max(call[0].shape[0] for call in weights["int8"])
        times = {form: [] for form in weights}
        for rows in ROWS:
            x = jnp.asarray(np.random.default_rng(1).standard_normal((rows, width)), jnp.float32)
            for calls in weights.values():
                seconds(steps, x, calls)
            turns = [[seconds(steps, x, calls) for calls in weights.values()] for _ in range(TURNS)]
            for form, best in zip(weights, np.min(turns, axis=0), strict=True):
                times[form].append(1e3 * best / STEPS)
        for form, row in times.items():
            show(form, *(f"{each:.1f} ({each / row[0]:.2f})" for each in row))
        print()


if __name__ == "__main__":
    main()
