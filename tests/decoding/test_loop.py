"""The whole loop on tiny models, against a decoder that shares no code with it."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.config import SamplingParams
from spec_jax.decoding.state import ERROR, LENGTH, STOP
from spec_jax.models.cache import KVCache
from spec_jax.testing import ReferenceDecoder, tiny_model
from tests.harness import (
    DRAFT,
    METHODS,
    TARGET,
    completions,
    finish,
    make_engine,
    request,
    run,
    shared_engine,
)
from tests.often import often

REFERENCE = ReferenceDecoder(TARGET)
PROMPTS = [[3], [1, 2, 3, 4, 5, 1, 2], [7, 7, 7, 7], list(range(16)) * 5]


def reference(prompts, params, **stops):
    return [REFERENCE.greedy(prompt, params, **stops) for prompt in prompts]


# With K = 3 under every policy and rule: tests/decoding/test_battery.py.
CASES = [(method, 4) for method in (*METHODS, "other, varying")]
OTHER_SIZES = [(method, lookahead) for method in METHODS[1:4] for lookahead in (1, 7)]


@pytest.mark.parametrize(
    ("method", "lookahead"), often([*CASES, *OTHER_SIZES], [("other", 4), ("prompt_lookup", 4)])
)
def test_greedy_tokens_are_the_targets_own(method, lookahead):
    engine = shared_engine(method, lookahead)
    requests = [request(prompt) for prompt in PROMPTS[:3]]
    expected = [tokens for tokens, _ in reference(PROMPTS[:3], requests[0].sampling)]
    assert run(engine, requests) == expected
    assert [run(engine, [each])[0] for each in requests] == expected


@pytest.mark.parametrize("method", often(METHODS, ["early_exit"]))
def test_greedy_with_every_processor_is_the_targets_own(method):
    params = SamplingParams(
        max_tokens=30,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.7,
        logit_bias={3: 1.5, 5: float("-inf")},
    )
    requests = [request(prompt, params) for prompt in PROMPTS]
    engine = shared_engine(method)
    assert run(engine, requests) == [tokens for tokens, _ in reference(PROMPTS, params)]


@pytest.mark.parametrize("method", often(METHODS, ["other"]))
@pytest.mark.slow
def test_greedy_with_bad_words_is_the_targets_own(method):
    free = [tokens for tokens, _ in reference(PROMPTS, SamplingParams(max_tokens=30))]
    # Words that stand in what the rows would say: at every distance, of one to four tokens.
    words = [[tokens[i : i + 1 + i % 4] for i in (3, 6, 9, 12)] for tokens in free]
    words[1] = []
    params = SamplingParams(max_tokens=30)
    requests = [
        request(prompt, params, bad_words=own) for prompt, own in zip(PROMPTS, words, strict=True)
    ]
    expected = [
        REFERENCE.greedy(prompt, params, bad_words=own)[0]
        for prompt, own in zip(PROMPTS, words, strict=True)
    ]
    assert [ours == theirs for ours, theirs in zip(expected, free, strict=True)] == [
        False, True, False, False,
    ]  # fmt: skip
    engine = shared_engine(method)
    assert run(engine, requests) == expected
    assert run(engine, requests[2:3]) == expected[2:3]


@pytest.mark.parametrize("min_tokens", [1, 3, 4, 9, 30])
@pytest.mark.parametrize("method", often(METHODS, ["other"]))
def test_greedy_with_min_tokens_is_the_targets_own(method, min_tokens):
    engine = shared_engine(method)
    free, _ = REFERENCE.greedy(PROMPTS[1], SamplingParams(max_tokens=30))
    # One row that would stop at once, one with another stop, one that need not go on.
    params = [SamplingParams(max_tokens=30, min_tokens=n) for n in (min_tokens, min_tokens, 0)]
    stops = [tuple(dict.fromkeys(free[:6])), (free[7],), (free[4],)]
    requests = [
        request(PROMPTS[1], each, stop_token_ids=stop)
        for each, stop in zip(params, stops, strict=True)
    ]
    batch = finish(engine.start(requests))
    expected = [
        REFERENCE.greedy(PROMPTS[1], each, stop_token_ids=stop)
        for each, stop in zip(params, stops, strict=True)
    ]
    assert completions(batch, requests) == [tokens for tokens, _ in expected]
    reasons = {"stop": STOP, "length": LENGTH}
    assert batch.state.finish[:3].tolist() == [reasons[reason] for _, reason in expected]
    for (tokens, _), own, stop in zip(expected, params, stops, strict=True):
        assert not set(tokens[: own.min_tokens]) & set(stop)


def test_a_self_draft_is_accepted_whole():
    engine = shared_engine("self")
    requests = [request(prompt, SamplingParams(max_tokens=41)) for prompt in PROMPTS[:3]]
    counters = finish(engine.start(requests)).state.counters
    # 8 rounds of 5 tokens and one of 1: the last round may draft nothing that cannot be emitted.
    assert counters.rounds[:3].tolist() == [9] * 3
    assert counters.drafted[:3].tolist() == counters.accepted[:3].tolist() == [32] * 3
    assert counters.accepted_per_position[:3].tolist() == [[8] * 4] * 3


@pytest.mark.parametrize("method", often(METHODS, ["other"]))
def test_rounds_may_be_cut_into_calls_anywhere(method):
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=5)
    requests = [request(prompt, params, seed=i) for i, prompt in enumerate(PROMPTS)]
    engine = shared_engine(method)
    assert run(engine, requests, rounds=1) == run(engine, requests)


@pytest.mark.parametrize("method", often(METHODS, ["other"]))
@pytest.mark.slow
def test_a_sampled_row_depends_on_its_seed_and_not_on_its_neighbours(method):
    warm = SamplingParams(max_tokens=40, temperature=0.9, top_p=0.95, repetition_penalty=1.1)
    others = [SamplingParams(max_tokens=9), SamplingParams(max_tokens=40, temperature=2.0, top_k=3)]
    engine = shared_engine(method)
    alone = run(engine, [request(PROMPTS[1], warm, seed=7)])[0]
    row = request(PROMPTS[1], warm, seed=7)
    # One neighbour is shorter and one is longer than the row.
    first, second = (
        request(PROMPTS[i], each, seed=i) for i, each in zip((0, 3), others, strict=True)
    )
    assert run(engine, [row, first, second])[0] == alone
    assert run(engine, [second, first, row])[2] == alone
    assert run(engine, [request(PROMPTS[1], warm, seed=8)])[0] != alone


def poisoned(state):
    """NaN in every KV slot, junk in every token, at or past its row's length."""

    def poison(x):
        if not isinstance(x, KVCache):
            return x

        def spoiled(layer):
            slots = jnp.arange(layer.slots, dtype=jnp.int32)
            stale = (slots[None] >= x.lengths[:, None])[:, None, :, None]
            return jax.tree.map(lambda each: jnp.where(stale, jnp.nan, each), layer)

        return dataclasses.replace(x, layers=tuple(spoiled(layer) for layer in x.layers))

    state = jax.tree.map(poison, state, is_leaf=lambda x: isinstance(x, KVCache))
    places = jnp.arange(state.tokens.shape[1], dtype=jnp.int32)
    junk = jnp.where(places[None] >= state.lengths[:, None], 2, state.tokens)
    return dataclasses.replace(state, tokens=junk)


POISONED = list(itertools.product(METHODS, (0.0, 1.0)))


@pytest.mark.parametrize(
    ("method", "temperature"),
    often(POISONED, [("other", 1.0), ("early_exit", 0.0)]),
)
def test_nothing_past_a_rows_length_is_ever_read(method, temperature):
    params = SamplingParams(max_tokens=40, temperature=temperature)
    requests = [request(prompt, params, seed=i) for i, prompt in enumerate(PROMPTS)]
    engine = shared_engine(method)
    expected = run(engine, requests)
    batch = engine.start(requests)
    while batch.running:
        batch.state = poisoned(batch.state)
        batch.advance(1)
    assert completions(batch, requests) == expected


@pytest.mark.parametrize("method", often(METHODS, ["other", "early_exit"]))
def test_rollback_leaves_the_cache_that_plain_decoding_would_have(method):
    requests = [request(prompt) for prompt in PROMPTS[:3]]
    plain = finish(shared_engine("none").start(requests)).state
    cache = finish(shared_engine(method).start(requests)).state.cache
    assert cache.lengths.tolist() == plain.cache.lengths.tolist()
    for row, length in enumerate(plain.cache.lengths[:3].tolist()):
        for ours, theirs in zip(cache.layers, plain.cache.layers, strict=True):
            kept, wanted = ours.values[row, :, :length], theirs.values[row, :, :length]
            np.testing.assert_allclose(kept, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", often(METHODS, ["prompt_lookup"]))
def test_a_stop_token_ends_a_row_wherever_it_stands_in_a_block(method):
    engine = shared_engine(method)
    free = reference(PROMPTS[:3], SamplingParams(max_tokens=40))
    for stop in sorted({token for tokens, _ in free for token in tokens}):
        requests = [request(prompt, stop_token_ids=(stop,)) for prompt in PROMPTS[:3]]
        batch = finish(engine.start(requests))
        expected = reference(PROMPTS[:3], requests[0].sampling, stop_token_ids=(stop,))
        assert completions(batch, requests) == [tokens for tokens, _ in expected]
        reasons = {"stop": STOP, "length": LENGTH}
        assert batch.state.finish[:3].tolist() == [reasons[reason] for _, reason in expected]


@pytest.mark.parametrize("method", often(METHODS, ["other"]))
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6, 11])
def test_max_tokens_is_met_exactly_and_a_stop_in_the_last_place_is_a_stop(method, max_tokens):
    engine = shared_engine(method)
    free = SamplingParams(max_tokens=max_tokens)
    batch = finish(engine.start([request(PROMPTS[1], free)]))
    (tokens, _), *_ = reference([PROMPTS[1]], free)
    assert completions(batch, [request(PROMPTS[1], free)]) == [tokens]
    assert batch.state.finish.tolist() == [LENGTH]
    if tokens[-1] not in tokens[:-1]:
        stopped = [request(PROMPTS[1], free, stop_token_ids=(tokens[-1],))]
        batch = finish(engine.start(stopped))
        assert completions(batch, stopped) == [tokens]
        assert batch.state.finish.tolist() == [STOP]


@pytest.mark.parametrize("method", often(METHODS, ["other"]))
def test_the_context_edge_ends_a_row(method):
    engine = make_engine(method, TARGET, DRAFT, max_len=300)
    params = SamplingParams(max_tokens=100)
    prompt = (PROMPTS[3] * 4)[:280]
    requests = [request(prompt, params, max_len=300)]
    batch = finish(engine.start(requests))
    expected, _ = REFERENCE.greedy(prompt, params, max_length=300)
    assert completions(batch, requests) == [expected]
    assert len(expected) == 20
    assert batch.state.finish.tolist() == [LENGTH]


def with_nan_row(model, token):
    """The model with a NaN in one token's embedding: it breaks once the token is read."""
    params = jax.tree.map(lambda x: x, model.params)
    weight = params["embed"]["weight"]
    weight[...] = weight[...].at[:, token].set(jnp.nan)
    return dataclasses.replace(model, params=params)


@pytest.mark.parametrize("method", often(METHODS, ["other"]))
@pytest.mark.parametrize("temperature", often([0.0, 1.0], [1.0]))
def test_a_nan_fails_its_own_row_only_and_keeps_what_was_decoded(method, temperature):
    params = SamplingParams(max_tokens=40, temperature=temperature)
    expected = run(shared_engine("none"), [request(p, params) for p in PROMPTS[1:3]])
    bad = next(t for t in expected[0] if t not in expected[1]) if temperature == 0 else 9
    broken = with_nan_row(TARGET, bad)
    requests = [request(p, params) for p in (*PROMPTS[1:3], [bad])]
    batch = finish(make_engine(method, broken, DRAFT).start(requests))
    tokens = completions(batch, requests)
    reasons = batch.state.finish[:3].tolist()
    assert (tokens[2], reasons[2]) == ([], ERROR)
    if temperature == 0:
        assert tokens[:2] == [expected[0][: expected[0].index(bad) + 1], expected[1]]
        assert reasons[:2] == [ERROR, LENGTH]
    for row, reason in zip(tokens[:2], reasons[:2], strict=True):
        assert all(0 <= token < 16 for token in row)
        assert (reason == ERROR) == (bad in row)


def test_a_nan_in_the_draft_model_costs_speed_and_nothing_else():
    broken = with_nan_row(DRAFT, 5)
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=30, temperature=temperature)
        requests = [request(prompt, params) for prompt in PROMPTS]
        batch = finish(make_engine("other", TARGET, broken).start(requests))
        assert batch.state.finish.tolist() == [LENGTH] * 4
        if temperature == 0:
            expected = [tokens for tokens, _ in reference(PROMPTS, params)]
            assert completions(batch, requests) == expected


def test_all_masked_rows_fail_alone():
    banned = SamplingParams(max_tokens=5, logit_bias={t: float("-inf") for t in range(16)})
    for params in (banned, dataclasses.replace(banned, temperature=1.0)):
        requests = [request(PROMPTS[0], params), request(PROMPTS[1])]
        batch = finish(shared_engine("prompt_lookup").start(requests))
        assert batch.state.finish[:2].tolist() == [ERROR, LENGTH]
        assert completions(batch, requests)[0] == []


@pytest.mark.parametrize("draft_vocab", often([12, 24], [12]))
def test_a_draft_with_another_padded_vocabulary_never_reaches_the_target(draft_vocab):
    draft = tiny_model(1, vocab_size=draft_vocab)
    params = SamplingParams(max_tokens=40, temperature=1.5)
    requests = [request([prompt[0] % 12], params, seed=i) for i, prompt in enumerate(PROMPTS)]
    for row in run(make_engine("other", TARGET, draft), requests):
        assert len(row) == 40 and all(0 <= token < 16 for token in row)
