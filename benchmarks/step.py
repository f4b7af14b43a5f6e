"""What a step of plain decoding takes, and how much of it the products with weights are.

    python -m benchmarks.step                  # half a minute on two idle cores

The demo model with its GGUF blocks: milliseconds a round over three prompts, the median of three
times, and milliseconds of the products of its 30 layers and of its head alone, by rows.
"""

import os
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.methods import show
from spec_jax import LLM, SamplingParams
from spec_jax.kernels.products import products

RECIPE = str(Path(__file__).resolve().parents[1] / "checkpoints" / "smollm2-135m-instruct.toml")
PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain speculative decoding to a child.",
    "What is the capital of France, and what is it known for?",
)


def round_ms(llm):
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    milliseconds = []
    for _ in range(4):  # the first compiles
        metrics = [
            llm.chat([chat], SamplingParams(max_tokens=96, temperature=0))[0].metrics
            for chat in chats
        ]
        seconds = sum(each.decode_seconds for each in metrics)
        milliseconds.append(1e3 * seconds / sum(each.rounds for each in metrics))
    return float(np.median(milliseconds[1:]))


def call_ms(function, x):
    """The weights are constants of the program: to pass hundreds of arrays takes a millisecond."""
    run, times = jax.jit(function), []
    run(x).block_until_ready()
    for _ in range(60):
        begin = time.perf_counter()
        run(x).block_until_ready()
        times.append(time.perf_counter() - begin)
    return 1e3 * float(np.median(times))


def layers(x, weights, count):
    for i in range(count):
        of = [weights[f"blocks.{i}.attention.{name}.weight"] for name in ("query", "key", "value")]
        x = products(x, of)[0]
        x = products(x, [weights[f"blocks.{i}.attention.output.weight"]])[0]
        both = [weights[f"blocks.{i}.mlp.{name}.weight"] for name in ("gate", "up")]
        gate, up = products(x, both)
        x = products(1e-3 * gate * up, [weights[f"blocks.{i}.mlp.down.weight"]])[0] * 1e-3
    return x


def main():
    llm = LLM(RECIPE, quantization="gguf", max_model_len=512)
    print(f"{round_ms(llm):.2f} ms a round of plain decoding\n")
    model = llm.engine.target
    weights, count = model.weights, model.config.num_layers
    show("rows", "layers, ms", "head, ms")
    show(*["---"] * 3)
    for rows in (1, 2, 3, 5, 8):
        x = jnp.full((rows, model.config.embed_size), 0.1)
        body = call_ms(lambda x: layers(x, weights, count), x)
        head = call_ms(lambda x: products(x, [weights["embed.weight"]])[0], x)
        show(str(rows), f"{body:.2f}", f"{head:.2f}")


if __name__ == "__main__":
    main()
