"""Requests of all kinds share few compiled programs."""

import dataclasses
import random

from spec_jax import LLM, SamplingParams
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
            top_k=choose((0, 0, 20)),
            top_p=choose((1.0, 0.9)),
            min_p=choose((0.0, 0.0, 0.1)),
            frequency_penalty=choose((0.0, 0.5)),
            bad_words=words,
            stop_token_ids=[choose(range(200)) for _ in range(choose(range(12)))],
            logprobs=choose((None, 0, 1, 5, 20)),
        )
        return llm.request("the inn " * choose(range(1, 20)), params)

    programs = set()
    for each in (request() for _ in range(200)):
        programs.add(dataclasses.replace(llm.engine.plan([each]), block=0))
    assert len(programs) <= 18


def test_requests_with_a_grammar_share_two_kinds_of_program(tmp_path):
    """Each round of theirs is several programs."""
    llm = LLM(str(write_directory(tmp_path / "tiny", CONFIG, llama_tensors(CONFIG))))
    shapes = set()
    for temperature in (0.0, 0.7):
        for more in ({}, {"top_k": 5}, {"top_p": 0.9}, {"min_tokens": 2}, {"bad_words": ["inn"]}):
            params = SamplingParams(
                temperature=temperature, structured_outputs={"regex": "[a-z]+"}, **more
            )
            shapes.add(llm.engine.plan([llm.request("the inn", params)]))
    assert len(shapes) == 2
