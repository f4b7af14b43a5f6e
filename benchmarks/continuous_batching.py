"""Many prompts with answers of mixed lengths: tokens per second of one `LLM.generate` call.

Uses nothing but `LLM.generate`, so that another checkout can be measured beside this one:

    python benchmarks/continuous_batching.py
    PYTHONPATH=../before python benchmarks/continuous_batching.py
"""

import argparse
import random
import time
from pathlib import Path

import spec_jax
from spec_jax import LLM, SamplingParams, SpeculativeConfig

RECIPE = Path(__file__).resolve().parents[1] / "checkpoints" / "smollm2-135m-instruct.toml"
SHORTEST, LONGEST = 8, 256
TOPICS = ("rivers", "the moon", "sorting a list", "bread", "old maps", "bees", "chess", "tides")


def main() -> None:
    """Warms up with as many prompts as there are rows, then measures the call."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--method", default="none", help="none or prompt_lookup")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--runs", type=int, default=1)
    args = parser.parse_args()

    draw = random.Random(0)
    prompts = [f"Tell me about {TOPICS[i % len(TOPICS)]}, part {i}." for i in range(args.prompts)]
    params = [
        SamplingParams(max_tokens=draw.randint(SHORTEST, LONGEST), ignore_eos=True) for _ in prompts
    ]
    llm = LLM(
        str(RECIPE),
        dtype=args.dtype,
        quantization=args.quantization,
        max_model_len=512,
        max_num_seqs=args.max_num_seqs,
        speculative_config=SpeculativeConfig(method=args.method),
    )
    # One row more than there is room for, so that whatever refills a slot is compiled, too; the
    # longest answer, so that the capacity is the same in the timed call.
    longest = max(each.max_tokens for each in params)
    short = SamplingParams(max_tokens=4, ignore_eos=True)
    warm = [SamplingParams(max_tokens=longest, ignore_eos=True)] + [short] * args.max_num_seqs
    llm.generate(prompts[: len(warm)], warm)

    print(f"{Path(spec_jax.__file__).parents[1]}: {args.prompts} prompts, {args.max_num_seqs} rows")
    for _ in range(args.runs):
        compiled, begin = llm.engine.compile_seconds, time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - begin
        tokens = sum(output.usage.completion_tokens for output in outputs)
        compiled = llm.engine.compile_seconds - compiled
        print(
            f"{tokens} tokens in {seconds:.1f} s: {tokens / seconds:.1f} tokens/s"
            f" ({compiled:.1f} s of it compiling)"
        )


if __name__ == "__main__":
    main()
