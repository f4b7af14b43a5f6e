"""Decodes many mixed requests with a tiny model: growth of memory, and programs kept.

    python -m benchmarks.soak [REQUESTS]

Requests differ in length, sampling, stops, bad words, log-probabilities and grammar; they come
alone, in batches and as streams, some of which are abandoned. After the first half, which warms
everything up, resident memory should not grow, however many requests follow. It changes with the
programs that happen to be kept, whose sizes differ, so that the trend is fitted to many readings.
"""

import gc
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from spec_jax import LLM, SamplingParams
from spec_jax.engine.programs import DECODE, MAX_PROGRAMS
from tests.checkpoints.tiny import CONFIG, llama_tensors, write_directory

WORDS = ("the", "thin", "inn", "end", "a")
READINGS = 20
"""How often memory is read in the second half."""


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def params(choose) -> SamplingParams:
    grammar = choose((None,) * 9 + ("[a-z]{2,6}( [0-9]{2})?",))
    return SamplingParams(
        max_tokens=choose((4, 8, 16, 40)),
        temperature=choose((0.0, 0.7, 1.0)),
        top_k=choose((0, 0, 20)),
        top_p=choose((1.0, 1.0, 0.9)),
        frequency_penalty=choose((0.0, 0.0, 0.5)),
        bad_words=[choose(WORDS) for _ in range(choose((0, 0, 0, 1, 6)))],
        stop=[choose(WORDS) for _ in range(choose((0, 0, 1)))],
        stop_token_ids=[choose(range(200)) for _ in range(choose((0, 0, 1, 4)))],
        logprobs=choose((None, None, None, 5)),
        structured_outputs=grammar and {"regex": grammar},
    )


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    choose = random.Random(0).choice
    config = CONFIG | {"max_position_embeddings": 512}
    with tempfile.TemporaryDirectory() as scratch:
        path = write_directory(Path(scratch) / "tiny", config, llama_tensors(config))
        llm = LLM(
            str(path),
            speculative_config={
                "method": "ngram",
                "num_speculative_tokens": 3,
                "draft_length_policy": "constant",
            },
            max_num_seqs=4,
        )
    done, begin, decoders = 0, time.monotonic(), set()
    readings: list[tuple[int, int]] = []
    while done < count:
        several = choose((1, 1, 2, 4, 6))
        prompts = [
            " ".join(choose(WORDS) for _ in range(choose((2, 9, 30)))) for _ in range(several)
        ]
        sampling = [params(choose) for _ in prompts]
        if choose((True, False, False)):
            for i, _ in enumerate(llm.stream(prompts, sampling)):
                if i == 20:
                    break
        else:
            llm.generate(prompts, sampling)
        done += several
        decoders |= {key for key in llm.engine.compiler.names() if key[0] == DECODE}
        if done >= count / 2 * (1 + len(readings) / READINGS):
            readings.append((done, resident()))
    after, taken = np.array(readings, float).T
    growth = np.polyfit(after / count, taken / 2**20, 1)[0] / 2
    report = {
        "requests": done,
        "seconds": round(time.monotonic() - begin),
        "MiB in the second half": [round(each / 2**20) for each in taken],
        "MiB that it added, by the trend": round(growth, 1),
        "programs kept": len(llm.engine.compiler.names()),
        "at most": MAX_PROGRAMS,
        "programs traced": llm.engine.traces,
        "decoding loops among them": len(decoders),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
