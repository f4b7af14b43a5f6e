"""Is a policy ever slower than plain decoding? With drafts good, poor and never right, in batches.

    python -m benchmarks.never_slower                        # about an hour on two idle cores
    python -m benchmarks.never_slower --batches 1 8 --temperatures 0

SmolLM2-135M-Instruct, on chat prompts and on prompts that ask for a copy. For each set, batch and
temperature: plain decoding in tokens/s, then each drafter under the policy and with a constant K of
4, as a multiple of plain decoding, and plain decoding once more, which says how large the noise is.
Each repeat runs all systems in an order drawn at random, and compares them with its own plain
decoding; medians of the repeats are shown. The first two do not count: they compile, and an
adaptive policy measures its costs.
"""

import argparse
import os
import random
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp
import numpy as np

import spec_jax
from benchmarks.methods import show
from spec_jax import LLM, SamplingParams
from spec_jax.drafters import Draft, Drafter, pytree, static
from tests.prompts import COPY_PROMPTS, PROMPTS

TARGET = "checkpoints/smollm2-135m-instruct.toml"
TOKENS, ALONE = 64, 3
DRAFTERS = {
    "lookup": {"method": "prompt_lookup"},
    "demo draft": {"draft": "checkpoints/smollm2-135m-instruct-draft.toml"},
    "never right": {"method": "never_right"},
}


@pytree
class NeverRight(Drafter):
    """Drafts token 0, which ends a document: the target emits it hardly ever."""

    lookahead: int = static()

    def propose(self, state, context):
        batch = context.lengths.shape[0]
        tokens = jnp.zeros((batch, self.lookahead), jnp.int32)
        return Draft(tokens=tokens, probs=None, lengths=context.limits), state


def systems(target: LLM, policy: str) -> dict[str, LLM]:
    """Plain decoding twice, and each drafter under the policy and with a constant K."""
    llms = {"plain": target, "plain again": target}
    for name, options in DRAFTERS.items():
        config = options | {"num_speculative_tokens": 4}
        llms[f"{name}, {policy}"] = target.with_speculation(
            config | {"draft_length_policy": policy}
        )
        constant = config | {"draft_length_policy": "constant"}
        llms[f"{name}, constant"] = target.with_speculation(constant)
    return llms


def tokens_per_second(llm: LLM, prompts: list[str], batch: int, temperature: float) -> float:
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=temperature, seed=7)
    begin, calls = time.perf_counter(), [prompts] if batch > 1 else prompts
    for each in calls:
        llm.generate(each, params)
    return len(prompts) * TOKENS / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="adaptive")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    orders = random.Random(0)
    spec_jax.register_drafter("never_right", lambda setting: NeverRight(setting.lookahead))
    target = LLM(TARGET, max_num_seqs=max(args.batches))
    llms = systems(target, args.policy)
    show("prompts, batch, temperature", "plain, tokens/s", *list(llms)[1:])
    show(*["---"] * (1 + len(llms)))
    worst: list[float] = []
    for batch in args.batches:
        for name, prompts in (("chat", PROMPTS), ("copy", COPY_PROMPTS)):
            some = [prompts[i % len(prompts)] for i in range(ALONE if batch == 1 else batch)]
            for temperature in args.temperatures:
                rates: dict[str, list[float]] = {each: [] for each in llms}
                for repeat in range(2 + args.repeats):
                    for each in orders.sample(list(llms), len(llms)):
                        rate = tokens_per_second(llms[each], some, batch, temperature)
                        rates[each] += [rate] if repeat > 1 else []
                ratios = {
                    each: statistics.median(np.divide(many, rates["plain"]).tolist())
                    for each, many in rates.items()
                }
                worst += [ratio for each, ratio in ratios.items() if each.endswith(args.policy)]
                show(
                    f"{name}, {batch}, {temperature:g}",
                    f"{statistics.median(rates['plain']):.1f}",
                    *(f"{ratio:.2f}" for each, ratio in ratios.items() if each != "plain"),
                )
    print(f"\nworst of {args.policy}: {min(worst):.2f}")


if __name__ == "__main__":
    main()
