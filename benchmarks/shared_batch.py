"""One running batch for all callers: throughput of several streams, a common prefix, a long prompt.

Uses nothing but `LLM`, so that another checkout can be measured beside this one:

    python benchmarks/shared_batch.py
    PYTHONPATH=../before python benchmarks/shared_batch.py
"""

import argparse
import itertools
import statistics
import threading
import time
from pathlib import Path

import spec_jax
from spec_jax import LLM, SamplingParams

RECIPE = Path(__file__).resolve().parents[1] / "checkpoints" / "smollm2-135m-instruct.toml"
SENTENCE = "The assistant answers every question about trains, in short and plain sentences. "


def main() -> None:
    """Measures what was asked for, each after a run that compiles."""
    measures = {"streams": streams, "prefix": common_prefix, "long": long_prompt}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measures", nargs="*", metavar="MEASURE", help="all by default")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    print(Path(spec_jax.__file__).parents[1])
    llm = LLM(str(RECIPE), max_model_len=6000, max_num_seqs=8)
    for name in args.measures or measures:
        measures[name](llm, args.runs)


def greedy(max_tokens: int) -> SamplingParams:
    """Greedy tokens that no end-of-sequence token stops."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def streams(llm: LLM, runs: int, num_threads: int = 4, num_streams: int = 2) -> None:
    """Tokens per second of threads that each read several streams in turn."""

    def read(thread: int) -> None:
        iterators = [
            llm.stream(f"Thread {thread} tells story {i} of a journey by train.", greedy(96))
            for i in range(num_streams)
        ]
        while iterators:
            for each in list(iterators):
                if next(each, None) is None:
                    iterators.remove(each)

    seconds = []
    for _ in range(runs + 1):
        begin = time.perf_counter()
        threads = [threading.Thread(target=read, args=(i,)) for i in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds.append(time.perf_counter() - begin)
    tokens = num_threads * num_streams * 96
    median = statistics.median(seconds[1:])
    print(f"{num_threads} threads, {num_streams} streams each: {tokens / median:.1f} tokens/s")


def common_prefix(llm: LLM, runs: int, num_prompts: int = 40) -> None:
    """Seconds of prompts with a common beginning of about 600 tokens, and what was computed."""
    system = SENTENCE * 43
    seconds, outputs = [], []
    for run in range(runs + 1):
        prompts = [f"{system}\nQuestion {run}.{i}: where is train {i}?" for i in range(num_prompts)]
        begin = time.perf_counter()
        outputs = llm.generate(prompts, greedy(8))
        seconds.append(time.perf_counter() - begin)
    lengths = [len(each.prompt_token_ids) for each in outputs]
    cached = [getattr(each, "num_cached_tokens", None) or 0 for each in outputs]
    print(
        f"{num_prompts} prompts of {min(lengths)} tokens or more: "
        f"{statistics.median(seconds[1:]):.2f} s; computed {sum(lengths) - sum(cached)} of "
        f"{sum(lengths)} tokens of prompts"
    )


def long_prompt(llm: LLM, runs: int) -> None:
    """The longest wait between two chunks of a stream while a long prompt comes in."""
    tokens = (llm.tokenizer.encode(SENTENCE) * 400)[:4000]
    for run in range(runs + 1):
        stream = llm.stream(f"Story {run} of a journey:", greedy(200))
        chunks, other = [], None
        for i, _ in enumerate(stream):
            chunks.append(time.perf_counter())
            if i == 4:
                prompt = {"prompt_token_ids": [*llm.tokenizer.encode(f"{run} "), *tokens[4:]]}
                other = threading.Thread(target=llm.generate, args=(prompt, greedy(4)))
                other.start()
        if other is not None:
            other.join()
        waits = [after - before for before, after in itertools.pairwise(chunks)]
        if run:
            print(
                f"a prompt of 4,000 tokens beside a stream: longest wait {max(waits):.2f} s, "
                f"median {statistics.median(waits):.3f} s"
            )


if __name__ == "__main__":
    main()
