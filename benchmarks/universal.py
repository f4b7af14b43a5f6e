"""How often drafts from another tokenizer are accepted: Gemma 3 270M and SmolLM2-135M-Instruct.

    python -m spec_jax.checkpoints fetch checkpoints/gemma3-270m.toml    # Gemma Terms of Use
    python -m benchmarks.universal             # half an hour on two cores

Acceptance is a property of models and texts, not of the machine: nothing is timed here.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

from spec_jax import LLM, RequestOutput, SamplingParams, SpeculativeConfig
from spec_jax.text.vocabulary import VocabularyMap
from tests.prompts import PROMPTS

CHECKPOINTS = Path(__file__).resolve().parents[1] / "checkpoints"
GEMMA = str(CHECKPOINTS / "gemma3-270m.toml")
SMOLLM2 = str(CHECKPOINTS / "smollm2-135m-instruct.toml")
METHODS = ("universal_text", "universal_vocabulary", "prompt_lookup")
LOOKAHEAD = 4


def show(*cells):
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def summary(outputs: Sequence[RequestOutput]) -> tuple[str, str, str]:
    """Acceptance rate, mean acceptance length, and the rate by position."""
    metrics = [output.metrics for output in outputs]
    rounds = sum(each.rounds for each in metrics)
    drafted = sum(each.draft_tokens for each in metrics)
    accepted = sum(each.accepted_tokens for each in metrics)
    positions = np.sum([each.accepted_per_position for each in metrics], axis=0) / rounds
    by_position = " ".join(f"{each:.2f}" for each in positions)
    return f"{accepted / drafted:.3f}", f"{1 + accepted / rounds:.2f}", by_position


def covered(target: LLM, drafter: LLM, outputs: Sequence[RequestOutput]) -> str:
    """The share of the target's tokens that the drafter has, and of the tokens that it said."""
    both = VocabularyMap.between(
        target.tokenizer,
        drafter.tokenizer,
        target_vocab_size=target.engine.target.config.vocab_size,
        drafter_vocab_size=drafter.engine.target.config.vocab_size,
        target_name="target",
        drafter_name="drafter",
    )
    token_ids = np.concatenate([output.token_ids for output in outputs])
    share = float(np.mean(both.to_drafter[token_ids] >= 0))
    return f"{both.coverage:.1%} of the vocabulary, {share:.1%} of what it says"


def report(target: str, draft: str, prompts: Sequence[str], tokens: int) -> None:
    plain, drafter = LLM(target, max_num_seqs=16), LLM(draft)
    if plain.tokenizer.chat_template is None:
        ids = [plain.tokenizer.encode(prompt) for prompt in prompts]
    else:
        ids = [plain.tokenizer.encode_chat([{"role": "user", "content": p}]) for p in prompts]
    settings = {
        temperature: [
            SamplingParams(max_tokens=tokens, temperature=temperature, seed=i)
            for i in range(len(prompts))
        ]
        for temperature in (0.0, 1.0)
    }
    expected = {temperature: plain.generate(ids, each) for temperature, each in settings.items()}
    print(
        f"\nTarget {Path(target).stem}, draft {Path(draft).stem}. The draft's tokens cover, of the"
    )
    for temperature, outputs in expected.items():
        print(f"target's: {covered(plain, drafter, outputs)} at temperature {temperature:g}.")
    print()
    show("method", "T", "acceptance rate", "mean acceptance length", "kept at 1 .. K", "as plain")
    show(*["---"] * 6)
    for method in METHODS:
        llm = plain.with_speculation(
            SpeculativeConfig(
                method=method,
                draft=draft if method.startswith("universal") else None,
                num_speculative_tokens=LOOKAHEAD,
                draft_length_policy="constant",
            )
        )
        for temperature, params in settings.items():
            outputs = llm.generate(ids, params)
            pairs = zip(outputs, expected[temperature], strict=True)
            same = sum(one.token_ids == other.token_ids for one, other in pairs)
            as_plain = f"{same} of {len(ids)}" if temperature == 0 else "-"
            show(method, f"{temperature:g}", *summary(outputs), as_plain)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    prompts = PROMPTS[:: len(PROMPTS) // args.prompts][: args.prompts]
    print(f"{len(prompts)} prompts, {args.tokens} tokens each, K = {LOOKAHEAD}, float32.")
    for target, draft in ((GEMMA, SMOLLM2), (SMOLLM2, GEMMA)):
        report(target, draft, prompts, args.tokens)


if __name__ == "__main__":
    main()
