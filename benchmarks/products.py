"""What native products and the reading of prompts cost by rows and by the form of the weights.

    python -m benchmarks.products              # two minutes on two idle cores

A product has one MLP matrix of the demo model; it is the best of five times fifty calls. A prompt
is read with one token generated, the best of three calls. To compare with another version of the
package, run it in a checkout of that version; `SPEC_JAX_NATIVE` chooses another kind of processor,
or 0 for XLA's own products.
"""

import os
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

from benchmarks.methods import show
from spec_jax import LLM, SamplingParams
from spec_jax.kernels import native
from spec_jax.kernels.products import products

RECIPE = str(Path(__file__).resolve().parents[1] / "checkpoints" / "smollm2-135m-instruct.toml")
FORMS = {
    "Q4_1 of the file": {"quantization": "gguf"},
    "int8": {"quantization": "int8"},
    "bfloat16": {"quantization": "none", "dtype": "bfloat16"},
    "float32": {"quantization": "none", "dtype": "float32"},
}
ROWS, PROMPTS = (1, 2, 3, 4, 5, 8, 16, 64), (36, 128, 512, 1500)


def product_seconds(weight, rows):
    multiply = jax.jit(lambda x, weight: products(x, [weight])[0])
    x, calls = jnp.ones((rows, weight.shape[0])), 50
    multiply(x, weight).block_until_ready()
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(calls):
            y = multiply(x, weight)
        y.block_until_ready()
        seconds.append((time.perf_counter() - begin) / calls)
    return min(seconds)


def prompt_seconds(llm, tokens):
    ids = [100 + 37 * i % 40_000 for i in range(tokens)]
    params = SamplingParams(max_tokens=1)
    return min(llm.generate([ids], params)[0].metrics.prefill_seconds for _ in range(3))


def main():
    print(f"native code: {native.description()}\n")
    models = {name: LLM(RECIPE, max_model_len=2048, **form) for name, form in FORMS.items()}
    show("milliseconds by rows", *map(str, ROWS))
    show(*["---"] * (1 + len(ROWS)))
    for name, llm in models.items():
        weight = next(each for key, each in llm.engine.target.weights.items() if "up" in key)
        show(name, *(f"{1e3 * product_seconds(weight, rows):.3f}" for rows in ROWS))
    print()
    show("tokens/s of prompts", *map(str, PROMPTS))
    show(*["---"] * (1 + len(PROMPTS)))
    for name, llm in models.items():
        show(name, *(f"{each / prompt_seconds(llm, each):.0f}" for each in PROMPTS))


if __name__ == "__main__":
    main()
