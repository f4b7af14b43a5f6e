"""Requests of all kinds share few compiled programs."""

import random

from spec_jax import LLM, SamplingParams
from spec_jax.sampling.parameters import Room, SamplingFeatures
from tests.checkpoints.tiny import CONFIG, llama_tensors, write_directory


def test_random_requests_share_few_programs(tmp_path):
    """By what a batch's shapes depend on, without compiling; the drafter adds nothing to it."""
    config = CONFIG | {"max_position_embeddings": 2048}
    llm = LLM(str(write_directory(tmp_path / "tiny", config, llama_tensors(config))))
    choose = random.Random(0).choice

    def request():
        words = [choose(("the", "thin inn", "a", "end in the")) for _ in range(choose(range(9)))]
        params = SamplingParams(
            max_tokens=choose((8, 16, 64, 100)),
            temperature=choose((0.0, 0.7)),
            bad_words=words,
            stop_token_ids=[choose(range(200)) for _ in range(choose(range(12)))],
            logprobs=choose((None, 0, 1, 5, 20)),
        )
        return llm.request("the inn " * choose(range(1, 20)), params)

    programs = set()
    for each in (request() for _ in range(200)):
        bucket, words = llm.engine.bucket([each]), [each.bad_words]
        features = SamplingFeatures.of([each.sampling], words, [-1])
        room = Room.of([each.stop_token_ids], words, features)
        programs.add((bucket.capacity, bucket.stops, bucket.logprobs, room))
    assert len(programs) <= 24
