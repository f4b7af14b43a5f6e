"""Are greedy texts of every drafting method plain decoding's? 200 prompts of Spec-Bench, 64 tokens.

    python -m benchmarks.equal_texts question.jsonl             # half an hour on two cores
    python -m benchmarks.equal_texts question.jsonl --methods draft "prompt lookup"

SmolLM2-135M-Instruct in batches of 8 with a constant K of 4, which drafts where `adaptive` would
not; its packed weights compute a token the same in every call, so that no text may differ. The
drafts from another tokenizer are Qwen2.5-Coder-0.5B-Instruct's.
"""

import argparse
import json
import os
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks.methods import show
from spec_jax import LLM, SamplingParams

TARGET = "checkpoints/smollm2-135m-instruct.toml"
DRAFT = {"draft": "checkpoints/smollm2-135m-instruct-draft.toml"}
OTHER = {"draft": "checkpoints/qwen2.5-coder-0.5b-instruct.toml"}
CONSTANT = {"draft_length_policy": "constant", "num_speculative_tokens": 4}
METHODS = {
    "draft": DRAFT | CONSTANT,
    "draft, until not confident": DRAFT | {"draft_length_policy": "confidence"},
    "draft, prefixes as a batch": DRAFT | CONSTANT | {"scoring": "prefix_batch"},
    "two drafts": DRAFT | CONSTANT | {"num_drafts": 2},
    "prompt lookup": {"method": "prompt_lookup"} | CONSTANT,
    "prompt lookup, two drafts": {"method": "prompt_lookup", "num_drafts": 2} | CONSTANT,
    "suffix": {"method": "suffix"} | CONSTANT,
    "recycle": {"method": "recycle"} | CONSTANT,
    "early exit": {"method": "early_exit"} | CONSTANT,
    "universal, vocabulary": {"method": "universal_vocabulary"} | OTHER | CONSTANT,
    "universal, text": {"method": "universal_text"} | OTHER | CONSTANT,
}
MAX_PROMPT, TOKENS = 1500, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", type=Path, help="Spec-Bench's question.jsonl")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--prompts", type=int, default=200)
    args = parser.parse_args()
    lines = args.questions.read_text().splitlines()
    turns = [json.loads(line)["turns"][0] for line in lines]
    target = LLM(TARGET, max_model_len=2048, max_num_seqs=8)
    # Every second question: all categories, which follow one another.
    prompts = [
        target.tokenizer.encode_chat([{"role": "user", "content": turn}])[:MAX_PROMPT]
        for turn in turns[::2][: args.prompts]
    ]
    params = SamplingParams(max_tokens=TOKENS)
    plain = target.generate(prompts, params)
    print(f"{len(plain)} texts, {sum(len(each.token_ids) for each in plain)} tokens\n")
    show("method", "texts that differ", "accepted of drafted tokens", "tokens a call", "seconds")
    show(*["---"] * 5)
    for name in args.methods:
        begin = time.perf_counter()
        outputs = target.with_speculation(METHODS[name]).generate(prompts, params)
        pairs = zip(plain, outputs, strict=True)
        differ = sum(a.token_ids != b.token_ids for a, b in pairs)
        drafted = sum(each.metrics.draft_tokens for each in outputs)
        accepted = sum(each.metrics.accepted_tokens for each in outputs)
        seconds = time.perf_counter() - begin
        calls = sum(each.metrics.rounds for each in outputs)
        tokens = sum(len(each.token_ids) for each in outputs)
        show(name, differ, f"{accepted} of {drafted}", f"{tokens / calls:.2f}", f"{seconds:.0f}")


if __name__ == "__main__":
    main()
