"""What quantized weights cost in bits and in logits, on real weights.

    python -m benchmarks.quantization          # two minutes on two cores

For 50 chat prompts and their greedy answers by the unquantized model, at each position of an
answer: the Kullback-Leibler divergence of the quantized model's distribution from the
distribution of the dequantized float32 model, in nats, and how often both have the same most
likely token. Then the perplexity of a text, in windows of 512 tokens.
"""

import argparse
import os
import resource
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.methods import show
from spec_jax import LLM, SamplingParams
from tests.prompts import PROMPTS

ROOT = Path(__file__).resolve().parents[1]
RECIPE = str(ROOT / "checkpoints" / "smollm2-135m-instruct.toml")
WINDOW = 512
SETTINGS = {
    f"{name}, activations in {activations}": options | {"activations": activations}
    for name, options in {
        "gguf": {"quantization": "gguf"},
        "int8": {"quantization": "int8"},
        "int4": {"quantization": "int4"},
    }.items()
    for activations in ("float32", "int8")
} | {
    "bfloat16": {"quantization": "none", "dtype": "bfloat16"},
    "float32, cache in int8": {"quantization": "none", "kv_cache_dtype": "int8"},
}


def log_probabilities(model, texts, starts):
    """Teacher-forced log-probabilities [positions, vocab] of the answers, in float64."""

    @jax.jit
    def score(model, tokens):
        return model.score(tokens, model.new_cache(1, tokens.shape[1]))[0]

    log_probs = []
    for text, start in zip(texts, starts, strict=True):
        padded = np.zeros((1, -(-len(text) // 128) * 128), np.int32)
        padded[0, : len(text)] = text
        logits = np.asarray(score(model, jnp.asarray(padded)), np.float64)[0, start - 1 : len(text)]
        logits -= logits.max(1, keepdims=True)
        log_probs.append(logits - np.log(np.exp(logits).sum(1, keepdims=True)))
    return log_probs


def perplexity(model, windows):
    """Of each window's tokens but its first, all together."""
    likelihoods = []
    for text in windows:
        (log_probs,) = log_probabilities(model, [text], [1])
        likelihoods.append(log_probs[np.arange(len(text) - 1), text[1:]])
    return np.exp(-np.mean(np.concatenate(likelihoods)))


def exact_answers(target, prompts, tokens):
    """Chat prompts with greedy answers of the unquantized float32 model.

    Returns:
      The model, their tokens, where the answers start, and the log-probabilities there.
    """
    exact = LLM(target, dtype="float32", quantization="none", max_model_len=1024, max_num_seqs=8)
    prompt_ids = [
        exact.tokenizer.encode_chat([{"role": "user", "content": each}])
        for each in PROMPTS[:prompts]
    ]
    outputs = exact.generate(prompt_ids, SamplingParams(max_tokens=tokens))
    texts = [
        [*prompt, *output.token_ids] for prompt, output in zip(prompt_ids, outputs, strict=True)
    ]
    starts = [len(prompt) for prompt in prompt_ids]
    return exact, texts, starts, log_probabilities(exact.engine.target, texts, starts)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--target", default=RECIPE, help="a quantized .gguf file or its recipe")
    parser.add_argument("--text", type=Path, default=ROOT / "docs" / "methods.md")
    parser.add_argument("--only", default="", help="settings whose names contain this")
    args = parser.parse_args()
    exact, texts, starts, expected = exact_answers(args.target, args.prompts, args.tokens)
    ids = exact.tokenizer.encode(args.text.read_text())
    windows = [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW + 1, WINDOW)]
    print(f"perplexity in float32: {perplexity(exact.engine.target, windows):.3f}\n")
    del exact
    show(
        "weights",
        "bits a parameter",
        "seconds to load",
        "mean KL",
        "99 % of KL below",
        "same top",
        "perplexity",
    )
    show(*["---"] * 7)
    for name, options in SETTINGS.items():
        if args.only not in name:
            continue
        begin = time.perf_counter()
        llm = LLM(args.target, max_model_len=1024, **{"dtype": "float32", **options})
        seconds, model = time.perf_counter() - begin, llm.engine.target
        count = sum(np.prod(weight.shape) for weight in model.weights.values())
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
        log_probs = log_probabilities(model, texts, starts)
        divergence, same = [], []
        for p, q in zip(expected, log_probs, strict=True):
            divergence.extend((np.exp(p) * (p - q)).sum(1))
            same.extend(p.argmax(1) == q.argmax(1))
        show(
            name,
            f"{8 * size / count:.2f}",
            f"{seconds:.1f}",
            f"{np.mean(divergence):.2e}",
            f"{np.quantile(divergence, 0.99):.2e}",
            f"{np.mean(same):.4f} of {len(same)}",
            f"{perplexity(model, windows):.3f}",
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"\nPeak of the process, with the float32 model: {peak / 1e9:.2f} GB.")


if __name__ == "__main__":
    main()
