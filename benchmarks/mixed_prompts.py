"""Seconds of prefill of short prompts in a call with long ones, by the largest block of prefill.

    python -m benchmarks.mixed_prompts 512 128 64

Prompts of 16 to 1,500 tokens, decoded in one call after one that compiles the programs.
"""

import sys

from spec_jax import LLM, SamplingParams
from spec_jax.engine import batch_shape

LENGTHS = (1500, 400, 132, 64, 16)


def main(blocks: list[int]) -> None:
    """Prints a line for each block; the second of two calls, which compiles nothing."""
    for block in blocks:
        batch_shape.CPU_BLOCK = block
        llm = LLM("smollm2-135m-instruct", max_num_seqs=1)
        prompts = [[(7 * i + j) % 40000 + 100 for i in range(n)] for j, n in enumerate(LENGTHS)]
        for _ in range(2):
            outputs = llm.generate(prompts, SamplingParams(max_tokens=4), use_tqdm=False)
        seconds = [f"{each.metrics.prefill_seconds:.2f}" for each in outputs]
        print(block, dict(zip(LENGTHS, seconds, strict=True)))


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]] or [batch_shape.CPU_BLOCK])
