"""What calls and rounds take on one GPU, for the shapes of models that people decode there.

    python -m benchmarks.gpu_steps             # some eight minutes on an H200

Weights are random: the time of a call does not depend on them. Rounds of a random pair keep about
one token each, so that only their time counts; with it and the acceptance of a real pair the
speed-up is known (docs/own_pair.md). Medians and ranges of repeats.
"""

import argparse
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu")

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import SamplingParams
from spec_jax.benchmarking.costs import greedy_steps, weight_bytes
from spec_jax.checkpoints.shape import read_shape
from spec_jax.decoding.draft_length import Constant
from spec_jax.drafters.draft_model import DraftModel
from spec_jax.drafters.none import NoDraft
from spec_jax.engine.engine import Engine
from spec_jax.engine.requests import Request
from spec_jax.planning.abstract import abstract_model

CHECKPOINTS = Path(__file__).resolve().parents[1] / "checkpoints"
REPEATS = 5
WIDTHS = {"none": (1, 2, 5, 9, 17), "int8": (1, 5), "int4": (1, 5)}
CAPACITIES = (4096, 32768)
LOOKAHEAD = 4
PROMPT, TOKENS = 128, 96


def show(*cells):
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def spread(seconds):
    low, middle, high = (1e3 * f(seconds) for f in (min, statistics.median, max))
    return f"{middle:.3f} ({low:.3f} - {high:.3f})"


def random_model(name, quantization="none"):
    """The shape of a recipe with random weights, made on the device."""
    shape = abstract_model(
        read_shape(CHECKPOINTS / f"{name}.toml").config, jnp.bfloat16, quantization, None
    )
    key = jax.random.key(0)

    def fill(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            scale = jnp.asarray(0.02, leaf.dtype)
            return scale * jax.random.normal(key, leaf.shape, leaf.dtype)
        return jax.random.bits(key, leaf.shape, f"uint{8 * leaf.dtype.itemsize}").astype(leaf.dtype)

    return jax.tree.map(jax.jit(fill, static_argnums=0), shape)


def bandwidth(size=2**32):
    """Bytes a second that a sum over `size` bytes reads; the best of ten."""
    data, best = jnp.ones(size // 4, jnp.float32), 0.0
    total = jax.jit(jnp.sum)
    for _ in range(10):
        begin = time.perf_counter()
        total(data).block_until_ready()
        best = max(best, size / (time.perf_counter() - begin))
    return best


def time_steps(name, quantization, model, widths, capacities, streaming):
    for rows, capacity in [(rows, 256) for rows in widths] + [(1, each) for each in capacities]:
        begin = time.perf_counter()
        step = greedy_steps(model, rows, steps=32, capacity=capacity)
        compiling = time.perf_counter() - begin
        seconds = [step() for _ in range(REPEATS + 1)][1:]
        share = weight_bytes(model) / statistics.median(seconds) / streaming
        show(
            name, quantization, rows, capacity, spread(seconds), f"{share:.2f}", f"{compiling:.0f}"
        )


def time_rounds(title, engine, sampling, batch):
    vocabulary = engine.target.config.vocab_size
    ids = np.random.default_rng(0).integers(100, vocabulary, (batch, PROMPT))
    requests = [
        Request(
            prompt_token_ids=row.tolist(),
            sampling=sampling,
            key=np.array([0, i], np.uint32),
            stop_token_ids=(),
            max_length=PROMPT + TOKENS,
        )
        for i, row in enumerate(ids)
    ]
    seconds, prompts = [], []
    for _ in range(REPEATS + 1):
        running = engine.start(requests)
        while running.running:
            running.advance(64)
        rounds = running.view.counters.rounds
        seconds.append(running.seconds.decode / int(rounds.max()))
        prompts.append(running.seconds.prefill)
    tokens = f"{TOKENS / rounds.mean():.2f}"
    show(title, batch, spread(seconds[1:]), tokens, spread(prompts[1:]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="llama-8b")
    parser.add_argument("--draft", default="llama-1b")
    parser.add_argument("--only", choices=("steps", "rounds"))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    streaming = bandwidth()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}: {streaming / 1e12:.2f} TB/s\n")
    if options.only != "rounds":
        show("model", "weights", "rows", "slots", "ms a step", "of the bandwidth", "compiling, s")
        show(*["---"] * 7)
        model = random_model(options.draft)
        time_steps(options.draft, "none", model, (1,), (), streaming)
        for quantization, widths in WIDTHS.items():
            model = random_model(options.target, quantization)
            longer = CAPACITIES if quantization == "none" else ()
            time_steps(options.target, quantization, model, widths, longer, streaming)
        print()
    if options.only == "steps":
        return
    target, draft = random_model(options.target), random_model(options.draft)
    settings = {"greedy": SamplingParams(max_tokens=TOKENS)}
    settings["T = 1, top-p 0.9"] = SamplingParams(max_tokens=TOKENS, temperature=1.0, top_p=0.9)
    show("rounds", "batch", "ms a round", "tokens a round", "ms for prompts")
    show(*["---"] * 5)
    for name, sampling in settings.items():
        for batch in options.batch:
            plain = Engine(target, NoDraft(), Constant(0), max_model_len=512)
            time_rounds(f"plain, {name}", plain, sampling, batch)
            drafter = DraftModel(draft, LOOKAHEAD)
            pair = Engine(target, drafter, Constant(LOOKAHEAD), max_model_len=512)
            time_rounds(f"K = {LOOKAHEAD}, {name}", pair, sampling, batch)


if __name__ == "__main__":
    main()
