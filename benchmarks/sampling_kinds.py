"""Milliseconds of a round by kind of sampling, on the demo model.

    python -m benchmarks.sampling_kinds [REPEATS]

Prompt lookup, K = 2, 48 tokens of one request at a time; the reading of its prompt is included.
Kinds take turns, and the first turn, which compiles, does not count. To compare two versions, run
each in turn.
"""

import statistics
import sys
import time

from spec_jax import LLM, SamplingParams

PROMPT = "Write a long story about a river and its fish."
KINDS: dict[str, dict] = {
    "greedy": {},
    "T = 0.8": {"temperature": 0.8},
    "top-k": {"temperature": 0.8, "top_k": 50},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "greedy, penalty": {"frequency_penalty": 0.3},
    "T = 0.8, penalty": {"temperature": 0.8, "frequency_penalty": 0.3},
    "three bad words": {"bad_words": ["the", "thin", "inn"]},
    "six bad words": {"bad_words": ["the", "thin", "inn", "end", "a", "foo"]},
    "regex": {"structured_outputs": {"regex": "[a-z ,.]{200,400}"}},
    "T = 0.8, regex": {"temperature": 0.8, "structured_outputs": {"regex": "[a-z ,.]{200,400}"}},
}


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    llm = LLM(
        "smollm2-135m-instruct",
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 2,
            "draft_length_policy": "constant",
        },
        max_model_len=1024,
    )
    rounds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for repeat in range(1 + repeats):
        for kind, options in KINDS.items():
            params = SamplingParams(
                **({"temperature": 0.0, "max_tokens": 48, "ignore_eos": True, "seed": 1} | options)
            )
            begin = time.perf_counter()
            metrics = llm.generate([PROMPT], params, use_tqdm=False)[0].metrics
            if repeat:
                rounds[kind].append(1000 * (time.perf_counter() - begin) / metrics.rounds)
    for kind, taken in rounds.items():
        print(f"{kind:18} {statistics.median(taken):6.2f} ms ({min(taken):.2f} - {max(taken):.2f})")


if __name__ == "__main__":
    main()
