"""How many greedy texts in bfloat16 equal plain decoding's, and what equality costs.

    python -m benchmarks.scoring_consistent [TEXTS TOKENS]

Prompt lookup with K = 4, one request at a time, SmolLM2-135M-Instruct: first as it is, then with
`scoring_consistent`, each compared with its own plain decoding. The second of two runs is timed.
"""

import sys
import time

from spec_jax import LLM, SamplingParams, SpeculativeConfig


def main() -> None:
    texts, tokens = (int(each) for each in sys.argv[1:] or (24, 64))
    stories = [f"Write a long story about a river and its fish, part {n}." for n in range(texts)]
    copies = [
        f"Copy this text {n} times: the quick brown fox {n * n} jumps over {n + 3} lazy dogs."
        for n in range(texts)
    ]
    prompts = [*stories[: texts // 2], *copies[: texts - texts // 2]]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    llm = LLM(
        "smollm2-135m-instruct",
        dtype="bfloat16",
        quantization="none",
        max_model_len=1024,
        max_num_seqs=1,
    )
    for consistent in (False, True):
        lookup = SpeculativeConfig(
            method="prompt_lookup", num_speculative_tokens=4, scoring_consistent=consistent
        )
        token_ids, speeds = [], []
        for config in (lookup, lookup.plain):
            engine = llm.with_speculation(config)
            for _ in range(2):
                begin = time.perf_counter()
                outputs = engine.generate(prompts, params)
                speeds.append(texts * tokens / (time.perf_counter() - begin))
            token_ids.append([each.token_ids for each in outputs])
        same = sum(one == other for one, other in zip(*token_ids, strict=True))
        print(
            f"{'scoring_consistent' if consistent else 'as it is':20} {same} of {texts} the same; "
            f"plain {speeds[3]:.1f} tokens/s, prompt lookup {speeds[1]:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
