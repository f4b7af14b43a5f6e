"""This checkout beside another one, such as the version before it: do the same calls get slower?

    git worktree add ../before v0.2
    python -m benchmarks.versions ../before                     # twenty minutes on two idle cores
    python -m benchmarks.versions ../before --only gguf/plain --repeats 8
    python -m benchmarks.versions ../before --only pair         # Qwen2.5-Coder, 1.5B and 0.5B

Each checkout runs in its own process, and the two take turns in each repeat, so that a machine
whose speed drifts drifts for both. Only names that both versions have are used.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = "checkpoints/smollm2-135m-instruct.toml"
PAIR_TARGET = "checkpoints/qwen2.5-coder-1.5b-instruct.toml"
DRAFT = {
    "draft_length_policy": "constant",
    "method": "draft_model",
    "draft": "checkpoints/smollm2-135m-instruct-draft.toml",
    "num_speculative_tokens": 4,
}
LOOKUP = {
    "draft_length_policy": "constant",
    "method": "prompt_lookup",
    "num_speculative_tokens": 4,
}
FORMATS = {
    "float32": {"dtype": "float32", "quantization": "none"},
    "bfloat16": {"dtype": "bfloat16", "quantization": "none"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "gguf": {},
    "pair": {"max_model_len": 1024},
}
METHODS = {"plain": None, "draft": DRAFT, "lookup": LOOKUP}
SAMPLED = {
    "adaptive": DRAFT | {"draft_length_policy": "adaptive"},
    "heuristic": DRAFT | {"draft_length_policy": "heuristic"},
    "block": DRAFT | {"verification": "block"},
    "prefix_batch": DRAFT | {"scoring": "prefix_batch"},
    "two drafts": DRAFT | {"num_drafts": 2},
}
PAIR_DRAFT = {
    "draft_length_policy": "constant",
    "draft": "checkpoints/qwen2.5-coder-0.5b-instruct.toml",
    "num_speculative_tokens": 4,
    "draft_vocab_size": 32_768,
    "draft_quantization": "int4",
}
WARM, NUCLEUS = {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.95}
CASES = {
    **{
        f"{form}/{name}": (form, METHODS[name], {})
        for form in FORMATS
        for name in METHODS
        if form != "pair"
    },
    **{f"gguf/{name}, T = 0.8": ("gguf", method, WARM) for name, method in SAMPLED.items()},
    "gguf/plain, top-p": ("gguf", None, NUCLEUS),
    "gguf/draft, top-p": ("gguf", DRAFT, NUCLEUS),
    "pair/plain": ("pair", None, {}),
    "pair/draft": ("pair", PAIR_DRAFT, {}),
    "pair/plain, top-p": ("pair", None, NUCLEUS),
    "pair/draft, top-p": ("pair", PAIR_DRAFT, NUCLEUS),
}
"""Name -> weights, drafting and sampling; the pair has a gigabyte, and is measured if named."""
TOKENS = 64


def serve() -> None:
    """Reads the names of cases and writes the tokens per second of each, in this checkout."""
    from spec_jax import LLM, SamplingParams
    from tests.prompts import PROMPTS

    targets, models = {}, {}

    def model_of(name: str) -> LLM:
        form, method, _ = CASES[name]
        if form not in targets:
            targets[form] = LLM(PAIR_TARGET if form == "pair" else TARGET, **FORMATS[form])
        target = targets[form]
        return target if method is None else target.with_speculation(method)

    def run(name: str) -> int:
        params = SamplingParams(
            **{"max_tokens": TOKENS, "temperature": 0, "seed": 7, "ignore_eos": True}
            | CASES[name][2]
        )
        outputs = [models[name].generate(prompt, params)[0] for prompt in PROMPTS[:3]]
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    for line in sys.stdin:
        name = json.loads(line)
        if name not in models:
            models[name] = model_of(name)
            run(name)  # compiles
            run(name)  # adaptive policies measure
        begin = time.perf_counter()
        tokens = run(name)
        print(json.dumps(tokens / (time.perf_counter() - begin)), flush=True)


def start(checkout: Path) -> subprocess.Popen:
    env = os.environ | {"PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(Path(__file__)), "--serve"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=checkout, env=env, stdin=pipe, stdout=pipe, text=True)


def ask(process: subprocess.Popen, name: str) -> float:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(name) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def main() -> None:
    """Prints a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, nargs="?", help="the other checkout")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve()
    if args.before is None:
        parser.error("name the other checkout")
    processes = start(ROOT), start(args.before.resolve())
    print("| case | now | before | ratio |\n| --- | --- | --- | --- |")
    for name in CASES:
        if args.only not in name or ("pair" in name) != ("pair" in args.only):
            continue
        rates = [[], []]
        for repeat in range(args.repeats):
            for side in (0, 1) if repeat % 2 else (1, 0):
                rates[side].append(ask(processes[side], name))
        now, before = map(statistics.median, rates)
        print(f"| {name} | {now:.1f} | {before:.1f} | {now / before:.3f} |", flush=True)


if __name__ == "__main__":
    main()
