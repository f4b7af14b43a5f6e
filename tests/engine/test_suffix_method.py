"""Method `suffix` through `LLM`: what is learnt, from whom, and that it changes no token."""

import dataclasses

import numpy as np
import pytest

from spec_jax import LLM, SamplingParams, SpeculativeConfig
from tests.checkpoints import tiny

PROMPTS = ["the thin thing in the", "a", "and then the end of the the the"]
# The penalty keeps a tiny model from repeating itself, so that drafts come from past outputs.
GREEDY = SamplingParams(max_tokens=32, ignore_eos=True, repetition_penalty=1.5)
THEIRS = dataclasses.replace(GREEDY, namespace="theirs")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "target"
    return LLM(str(tiny.write_directory(path, tiny.CONFIG, tiny.llama_tensors(tiny.CONFIG))))


@pytest.fixture(scope="module")
def compiled(plain):
    return plain.with_speculation(
        SpeculativeConfig(method="suffix", draft_length_policy="constant")
    ).engine


@pytest.fixture
def fresh(plain, compiled):
    """Makes an `LLM` that has decoded nothing yet; all of them share what one has compiled."""

    def make():
        llm = plain.with_speculation(
            SpeculativeConfig(method="suffix", draft_length_policy="constant")
        )
        llm.engine.compiler = compiled.compiler
        return llm

    return make


def ids(outputs):
    return [output.token_ids for output in outputs]


def work(outputs):
    """What the drafts of each request came to."""
    metrics = [output.metrics for output in outputs]
    return [(each.rounds, each.draft_tokens, each.accepted_tokens) for each in metrics]


def test_a_second_pass_says_the_same_in_fewer_rounds(plain, fresh):
    llm, expected = fresh(), ids(plain.generate(PROMPTS, GREEDY))
    first, second = llm.generate(PROMPTS, GREEDY), llm.generate(PROMPTS, GREEDY)
    assert ids(first) == ids(second) == expected
    for before, after in zip(first, second, strict=True):
        assert after.metrics.rounds < before.metrics.rounds / 2


def test_one_namespace_learns_nothing_of_another(fresh):
    """Neither what is proposed nor how fast it goes tells of the other's outputs."""
    llm = fresh()
    alone = work(llm.generate(PROMPTS, GREEDY))
    other = fresh()
    for _ in range(2):
        other.generate(PROMPTS, THEIRS)
    assert work(other.generate(PROMPTS, GREEDY)) == alone
    together = other.generate(PROMPTS, [THEIRS, GREEDY, THEIRS])
    assert together[0].metrics.rounds < alone[0][0] / 2
    assert work(together)[1] == work(llm.generate(PROMPTS, GREEDY))[1]


def test_outputs_of_a_batch_help_the_next_batch_of_the_same_call(plain, fresh):
    llm = fresh()
    llm.max_num_seqs = 1
    first, second = llm.generate([PROMPTS[0]] * 2, GREEDY)
    assert first.token_ids == second.token_ids
    assert second.metrics.rounds < first.metrics.rounds / 2


def test_the_same_requests_are_drafted_for_alike_however_they_are_cut_into_calls(fresh):
    warm = [SamplingParams(max_tokens=16 + i, temperature=0.7, seed=i) for i in range(3)]
    streams = [fresh(), fresh()]
    for llm in streams:
        llm.generate(PROMPTS, warm)
        llm.generate(PROMPTS, GREEDY)
    outputs = [llm.generate(PROMPTS, warm) for llm in streams]
    assert ids(outputs[0]) == ids(outputs[1]) and work(outputs[0]) == work(outputs[1])
    llm = fresh()
    for params in (warm, GREEDY):
        assert len(list(llm.stream(PROMPTS, params))) > len(PROMPTS)
    assert work(llm.generate(PROMPTS, warm)) == work(outputs[0])


def stored(llm, namespace=""):
    """The outputs of a namespace as the drafter would be told them."""
    ids = llm.tokenizer.encode(PROMPTS[0])
    request = llm.request(ids, SamplingParams(namespace=namespace))
    tokens, _, counts = llm.engine.inputs([request], llm.engine.plan([request]))
    text = tokens[0].tolist()
    assert counts[0] == sum(token >= 0 for token in text)
    return text[: text.index(-1, counts[0])] if counts[0] else []


def test_outputs_are_stored_under_their_own_names(fresh):
    llm = fresh()
    long = SamplingParams(max_tokens=20, ignore_eos=True)
    short = SamplingParams(max_tokens=3, ignore_eos=True, namespace="short")
    outputs = llm.generate(PROMPTS[:2], [long, short])
    assert stored(llm) == list(outputs[0].token_ids) and len(outputs[0].token_ids) == 20
    assert stored(llm, "short") == list(outputs[1].token_ids)
    assert stored(llm, "shor") == []


def test_what_a_request_said_before_it_failed_is_not_stored(plain, fresh, tmp_path):
    """Once the model reads a token whose embedding is broken, it has no distribution."""
    good, other = plain.generate(PROMPTS[:2], GREEDY)
    prompts = {each for prompt in PROMPTS[:2] for each in plain.tokenizer.encode(prompt)}
    bad = next(each for each in good.token_ids[4:] if each not in {*prompts, *other.token_ids})
    tensors = tiny.llama_tensors(tiny.CONFIG)
    tensors["model.embed_tokens.weight"][bad] = np.nan
    path = tiny.write_directory(tmp_path / "broken", tiny.CONFIG, tensors)
    llm = LLM(
        str(path),
        speculative_config=SpeculativeConfig(method="suffix", draft_length_policy="constant"),
    )
    failed, fine = llm.generate(PROMPTS[:2], GREEDY)
    assert failed.finish_reason == "error" and bad in failed.token_ids
    assert stored(llm) == list(fine.token_ids) == list(other.token_ids)


def test_a_stop_string_ends_what_is_stored(fresh):
    llm = fresh()
    letters = {t: float("-inf") for t in range(tiny.CONFIG["vocab_size"]) if not 30 < t < 90}
    free = SamplingParams(max_tokens=24, ignore_eos=True, logit_bias=letters, namespace="free")
    (whole,) = llm.generate(PROMPTS[0], free)
    stop = whole.text[len(whole.text) // 2 :][:2]
    (cut,) = llm.generate(PROMPTS[0], dataclasses.replace(free, stop=(stop,), namespace=""))
    assert cut.finish_reason == "stop" and len(cut.token_ids) < len(whole.token_ids)
    assert stored(llm) == list(cut.token_ids)
