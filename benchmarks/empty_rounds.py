"""What a round takes in which nothing is drafted, beside a round of plain decoding.

    python -m benchmarks.empty_rounds            # ten minutes on two idle cores

SmolLM2-135M-Instruct with prompt lookup, whose policy never drafts: what is left is the price of
being able to. Milliseconds of rounds, in turns whose order is drawn at random: the median of plain
decoding, and the median of the differences from it in the same turn.
"""

import argparse
import dataclasses
import os
import random
import statistics

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp

from benchmarks.methods import show
from spec_jax import LLM, SamplingParams
from spec_jax.decoding.adaptive import Adaptive
from tests.prompts import PROMPTS

TARGET, TOKENS = "checkpoints/smollm2-135m-instruct.toml", 64
METHOD = {"method": "prompt_lookup"}


@dataclasses.dataclass(frozen=True)
class NeverDrafts(Adaptive):
    """Keeps the statistics of `adaptive`, and drafts nothing."""

    def limits(self, state, running):
        return jnp.zeros(running.shape, jnp.int32)


def never_drafts(target: LLM, lookahead: int) -> LLM:
    llm = target.with_speculation(METHOD | {"num_speculative_tokens": lookahead})
    engine = llm.engine
    engine.strategy = dataclasses.replace(engine.strategy, draft_length=NeverDrafts(lookahead))
    engine.cost_profiler = None
    return llm


def round_ms(llm: LLM, prompts: list[str], temperature: float) -> float:
    params = SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=7, ignore_eos=True)
    metrics = [each.metrics for each in llm.generate(prompts, params)]
    return 1e3 * max(each.decode_seconds for each in metrics) / max(each.rounds for each in metrics)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 8, 16])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--lookaheads", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--turns", type=int, default=20)
    args = parser.parse_args()
    orders = random.Random(0)
    target = LLM(TARGET, max_num_seqs=max(args.batches))
    llms = {"plain": target, "plain again": target}
    llms |= {f"K = {each}": never_drafts(target, each) for each in args.lookaheads}
    show("batch, temperature", "plain, ms", *list(llms)[1:])
    show(*["---"] * (1 + len(llms)))
    for batch in args.batches:
        prompts = [PROMPTS[i % len(PROMPTS)] for i in range(batch)]
        for temperature in args.temperatures:
            times: dict[str, list[float]] = {name: [] for name in llms}
            for turn in range(2 + args.turns):  # the first ones compile
                for name in orders.sample(list(llms), len(llms)):
                    each = round_ms(llms[name], prompts, temperature)
                    times[name] += [each] if turn > 1 else []
            plain = times.pop("plain")
            pairs = {name: zip(plain, each, strict=True) for name, each in times.items()}
            show(
                f"{batch}, {temperature:g}",
                f"{statistics.median(plain):.2f}",
                *(f"{statistics.median(b - a for a, b in each):+.2f}" for each in pairs.values()),
            )


if __name__ == "__main__":
    main()
