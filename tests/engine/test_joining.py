"""Rows that join a running batch: what they say, and what it costs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_jax.config import SamplingParams
from spec_jax.decoding.adaptive import Adaptive
from spec_jax.decoding.rows import insert_rows
from spec_jax.decoding.state import ERROR
from spec_jax.engine import engine as engine_module
from spec_jax.engine.programs import INSERT
from spec_jax.models.model import Model
from spec_jax.testing import tiny_model
from tests import quick
from tests.harness import DRAFT, DRAFTINGS, TARGET, drive, make_engine, request, shared_engine
from tests.often import often

VOCAB = TARGET.config.vocab_size

HOSTILE = [
    SamplingParams(max_tokens=12, logit_bias=dict.fromkeys(range(VOCAB), float("-inf"))),
    SamplingParams(max_tokens=9, temperature=2.0, top_k=3, presence_penalty=1.5, min_tokens=4),
    SamplingParams(max_tokens=1, temperature=0.5),
    SamplingParams(max_tokens=30, repetition_penalty=1.7, logit_bias={3: 5.0, 4: float("-inf")}),
]
"""Neighbours that would show in a row if anything of theirs reached it; the first has no p."""
OWN = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=17, temperature=0.9),
    SamplingParams(max_tokens=20, temperature=1.3, top_p=0.9, frequency_penalty=0.4),
]


def requests_of(seed):
    """Eight requests, every other one hostile, with prompts of 1 to 33 tokens."""
    random = np.random.default_rng(seed)
    kinds = [OWN[i // 2 % len(OWN)] if i % 2 else HOSTILE[i // 2 % len(HOSTILE)] for i in range(8)]
    return [
        request(
            random.integers(0, VOCAB, random.integers(1, 34)).tolist(),
            params,
            stop_token_ids=(5,) if i % 3 == 0 else (),
            bad_words=[[int(random.integers(VOCAB))], [1, 2]] if i % 3 == 1 else (),
            seed=100 * seed + i,
        )
        for i, params in enumerate(kinds)
    ]


def alone(engine, requests):
    """What each of the requests says alone; in batches with room for any, which share programs."""
    return [
        drive(engine, [each], 1, lambda low, high: high, room_for=requests)[0] for each in requests
    ]


@functools.cache
def decoded_alone(method):
    """An engine, its requests, and what each of them says alone."""
    engine, requests = make_engine(method, TARGET, DRAFT, lookahead=3), requests_of(1)
    return engine, requests, alone(engine, requests)


IN_ANY_PLACE = [*DRAFTINGS, "other, varying"]


@pytest.mark.parametrize("examples", often([2, 30], [2]))
@pytest.mark.parametrize("method", often(IN_ANY_PLACE, ["other"]))
def test_a_row_says_the_same_whenever_and_wherever_it_joins(method, examples, monkeypatch):
    monkeypatch.setattr(engine_module, "MIN_CAPACITY", 64)
    engine, requests, expected = decoded_alone(method)
    assert expected[0] == ([], ERROR) and len({tuple(said) for said, _ in expected}) >= 6

    @settings(max_examples=examples)
    @given(st.data())
    def check(data):
        said = drive(engine, requests, 4, lambda low, high: data.draw(st.integers(low, high)))
        assert said == expected

    check()


@pytest.mark.slow
def test_rows_whose_prompts_are_read_together_say_the_same(monkeypatch):
    """As accelerators read them: the batch's program is fed again when slots become free."""
    monkeypatch.setattr(engine_module, "MIN_CAPACITY", 64)
    monkeypatch.setattr(type(TARGET), "platform", "gpu")
    engine = make_engine("other", TARGET, DRAFT, lookahead=3)
    requests = requests_of(2)
    expected = alone(engine, requests)
    random = np.random.default_rng(0)
    said = drive(engine, requests, 3, lambda low, high: int(random.integers(low, high + 1)))
    assert said == expected


def test_a_row_of_the_first_wave_says_what_it_says_when_it_joins_later():
    """To the last bit: prompts are read in the same way, whoever else waits."""
    engine = shared_engine("other")
    requests = [*requests_of(3)[1::2]] * 2
    said = drive(engine, requests, 4, lambda low, high: high)
    assert said[:4] == said[4:]


def test_costs_and_what_is_forced_stay_the_batchs():
    policy = Adaptive(4)
    state, rows = policy.init(4), policy.init(1)
    rows = jax.tree.map(lambda leaf: leaf + 7, rows)
    joined = policy.insert(state, jnp.array([[2]], jnp.int32), rows)
    for name in ("costs", "forced"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(state, name))
    for name in ("accepted", "judged", "lost", "spent"):
        expected = np.asarray(getattr(state, name)).copy()
        expected[2] += 7
        np.testing.assert_array_equal(getattr(joined, name), expected)


def test_rows_join_slots_of_their_own_shard_and_padding_joins_nothing():
    state, rows = jnp.arange(8 * 2).reshape(8, 2), -jnp.arange(1, 9).reshape(4, 2)
    # Two shards of four slots, and two rows each: the second row of the first shard is padding.
    joined = np.asarray(insert_rows(state, jnp.array([[3, 4], [0, 2]], jnp.int32), rows))
    expected = np.array(state)
    expected[[3, 4, 6]] = rows[jnp.array([0, 2, 3])]
    np.testing.assert_array_equal(joined, expected)


@pytest.mark.parametrize("platform", often(["cpu", "gpu"], ["gpu"]))
def test_joining_updates_the_batch_in_place(platform, monkeypatch):
    """One program for all slots, which overwrites the batch's buffers and copies none of them.

    Rows are read, and join, one at a time or several.
    """
    monkeypatch.setattr(type(TARGET), "platform", platform)
    monkeypatch.setattr(Model, "compiler_options", quick.OPTIMIZED)
    deep = tiny_model(0, num_layers=4, max_position=8192)
    engine = make_engine("self", deep, lookahead=2, max_len=8192)
    params = SamplingParams(max_tokens=4000)
    batch = engine.open([request([1, 2, 3], params, max_len=4003)] * 5, 4)
    for slot in range(4):
        batch.insert({slot: request([1, 2, 3], params, max_len=4003)})
    (program,) = engine.compiler.programs(INSERT)
    size, caches = program.memory_analysis(), jax.tree.leaves(batch.state.cache)
    needed = sum(leaf.nbytes for leaf in caches)
    assert size.alias_size_in_bytes > 2 * needed  # the drafter's cache is as large
    assert size.output_size_in_bytes - size.alias_size_in_bytes < 4096
    assert size.temp_size_in_bytes < caches[0].nbytes / 4  # less than one row of one layer


def test_a_bucket_of_rows_is_compiled_once(monkeypatch):
    monkeypatch.setattr(engine_module, "MIN_CAPACITY", 64)
    engine = make_engine("prompt_lookup", TARGET)
    requests = [request([1] * n, SamplingParams(max_tokens=5), seed=n) for n in (3, 30, 9, 17, 2)]
    drive(engine, requests, 4, lambda low, high: high)
    assert engine.traces == 4  # the reading of prompts, the empty batch, joining, the loop
    drive(engine, requests[::-1], 4, lambda low, high: high)
    assert engine.traces == 4
    sampled = SamplingParams(max_tokens=5, temperature=1.0, top_p=0.9)
    requests = [dataclasses.replace(each, sampling=sampled) for each in requests]
    drive(engine, requests, 4, lambda low, high: high)
    assert engine.traces == 5  # another loop alone
