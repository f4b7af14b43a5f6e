"""What `all_reduce_dtype = "bfloat16"` of a layout costs in logits, and saves in a plan.

    python -m benchmarks.all_reduce          # three minutes on two cores

XLA:CPU adds in float32 whatever the program says, so one device stands for several chips: each
product whose inputs a layout shards is cut into the chips' parts, their sums are rounded to
bfloat16, and added in pairs, rounded after each. Chips may add in another order, or in float32.
Divergences are measured from the dequantized float32 model, as in benchmarks/quantization.py.
"""

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.methods import show
from benchmarks.quantization import RECIPE, exact_answers, log_probabilities
from spec_jax import LLM
from spec_jax.models.layers import Linear, project

SHARDED = ("heads", "mlp")


def rounded(x):
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def on_chips(count):
    """`Linear.__call__` as chips compute it that hold parts of the inputs."""

    def call(self, x, placement=None, num_tokens=None, residual=None):
        assert residual is None  # only native code adds it
        weight, (inputs, _) = self.weight.get_value(), self.weight.get_metadata()["axes"]
        if inputs not in SHARDED or count == 1:
            return project(x, [self])[0]
        parts = [
            rounded(jnp.matmul(some, rows, preferred_element_type=jnp.float32))
            for some, rows in zip(
                jnp.split(x.astype(weight.dtype), count, -1), jnp.split(weight, count), strict=True
            )
        ]
        while len(parts) > 1:
            parts = [rounded(sum(pair)) for pair in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    return call


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--chips", type=int, nargs="+", default=[1, 2, 8, 16])
    args = parser.parse_args()
    _, texts, starts, expected = exact_answers(RECIPE, args.prompts, args.tokens)
    # Plain arrays, which can be cut; native code keeps its weights in panels.
    layout = {"layout": "cpu-1", "dtype": "bfloat16", "quantization": "none"}
    model = LLM(RECIPE, max_model_len=1024, **layout).engine.target
    show("chips", "mean KL", "99 % of KL below", "same top", "mean KL from one chip")
    show(*["---"] * 5)
    unsharded = None
    for count in args.chips:
        Linear.__call__ = on_chips(count)
        jax.clear_caches()
        log_probs = log_probabilities(model, texts, starts)
        unsharded = unsharded or log_probs
        divergence, same, divergence_of_sums = [], [], []
        for p, q, one in zip(expected, log_probs, unsharded, strict=True):
            divergence.extend((np.exp(p) * (p - q)).sum(1))
            same.extend(p.argmax(1) == q.argmax(1))
            divergence_of_sums.extend((np.exp(one) * (one - q)).sum(1))
        show(
            count if count > 1 else "1, or sums in float32",
            f"{np.mean(divergence):.2e}",
            f"{np.quantile(divergence, 0.99):.2e}",
            f"{np.mean(same):.4f} of {len(same)}",
            f"{np.mean(divergence_of_sums):.2e}",
        )


if __name__ == "__main__":
    main()
