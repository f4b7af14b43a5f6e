"""Several drafts of one row, some shorter than others or missing: nothing is lost by them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.config import SamplingParams
from spec_jax.decoding.lookahead import Constant
from spec_jax.decoding.several import verify_several
from spec_jax.drafters.base import Draft
from spec_jax.drafters.prompt_lookup import PromptLookup
from spec_jax.engine import Engine
from spec_jax.testing import ReferenceDecoder
from tests.decoding.test_sampled import LENGTH, P_VALUE, ROWS, VOCAB, chi_square
from tests.decoding.test_sampled import TARGET as SAMPLED_TARGET
from tests.harness import TARGET, completions, finish, request

DRAFTS = 3
TRIES = 50_000


def engine_of(target, lookahead, drafts=DRAFTS):
    drafter = PromptLookup(lookahead, 3, drafts)
    return Engine(target, drafter, Constant(lookahead), max_model_len=512)


def emitted(p, tokens, length):
    """Verdicts on one draft under many keys: accepted, chosen, token."""
    tokens = jnp.asarray(tokens, jnp.int32).reshape(1, -1)
    repeat = lambda x: jnp.repeat(x, TRIES, axis=0)  # noqa: E731
    draft = Draft(repeat(tokens), None, jnp.full((TRIES,), length, jnp.int32), drafts=DRAFTS)
    keys = jax.random.split(jax.random.key(0), TRIES)
    verdict = jax.jit(verify_several)(
        repeat(jnp.asarray(p, jnp.float32)[None]), draft, keys, jnp.bool_(True)
    )
    assert verdict.valid.all()
    return (np.asarray(each) for each in (verdict.accepted, verdict.chosen, verdict.token))


@pytest.mark.parametrize(
    ("tokens", "length"),
    [
        pytest.param([[0, 1, -1], [2, 3, -1]], 2, id="a draft is missing"),
        pytest.param([[0, 1, 3], [2, -1, -1]], 2, id="drafts end early"),
        pytest.param([[-1, 1, -1], [-1, 3, -1]], 2, id="the first is missing"),
        pytest.param([[0, 0, 1], [-1, 2, 3]], 2, id="one ends where its twin goes on"),
        pytest.param([[-1, -1, -1], [-1, -1, -1]], 0, id="all are missing"),
    ],
)
def test_missing_tokens_are_neither_tried_nor_kept(tokens, length):
    """The last token of the vocabulary, which -1 would index, is likely everywhere."""
    tokens = np.asarray(tokens)
    p = np.random.default_rng(0).dirichlet([1, 1, 1, 3], 1 + 2 * DRAFTS)
    branches = {start: np.flatnonzero(tokens[0] == start) for start in tokens[0] if start >= 0}
    for branch in branches.values():
        p[1 + branch] = p[1 + branch[0]]  # drafts that begin alike lead to one place
    accepted, chosen, token = emitted(p, tokens, length)
    first = np.where(accepted > 0, tokens[0, chosen], token)
    second = np.where(accepted > 1, tokens[1, chosen], token)
    assert chi_square(np.bincount(first, minlength=4), p[0]) > P_VALUE
    assert set(first[accepted > 0]) == set(branches)
    for start, branch in branches.items():
        rows = (accepted > 0) & (first == start)
        assert chi_square(np.bincount(second[rows], minlength=4), p[1 + branch[0]]) > P_VALUE
        proposed = {each for each in tokens[1, branch] if each >= 0}
        assert set(second[rows & (accepted > 1)]) == proposed


REFERENCE = ReferenceDecoder(TARGET)
PROMPTS = [[3], [1, 2, 3, 1, 2, 4, 1, 2], [7, 7, 7, 7], [0, 5, 6, 0, 5, 7, 8, 0, 5, 9, 0, 5]]


@pytest.mark.parametrize("lookahead", [1, 4])
def test_greedy_tokens_are_the_targets_own(lookahead):
    params = SamplingParams(max_tokens=40)
    requests = [request(prompt, params) for prompt in PROMPTS]
    expected = [REFERENCE.greedy(prompt, params)[0] for prompt in PROMPTS]
    rounds = {}
    for drafts in (1, DRAFTS):
        batch = finish(engine_of(TARGET, lookahead, drafts).start(requests))
        assert completions(batch, requests) == expected
        rounds[drafts] = int(batch.state.counters.rounds.sum())
    assert rounds[DRAFTS] < rounds[1]  # the second or third draft is kept now and then


def test_penalties_see_the_tokens_of_their_own_draft_only():
    params = SamplingParams(
        max_tokens=40, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.7
    )
    requests = [request(prompt, params) for prompt in PROMPTS]
    expected = [REFERENCE.greedy(prompt, params)[0] for prompt in PROMPTS]
    assert completions(finish(engine_of(TARGET, 4).start(requests)), requests) == expected


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_sampled_tokens_have_the_targets_joint_distribution(temperature):
    """The prompt has continuations of different lengths, and leads to rounds without any."""
    prompt = [1, 2, 1, 3, 0, 1]
    params = SamplingParams(max_tokens=LENGTH, temperature=temperature, top_p=0.95)
    requests = [request(prompt, params, seed=i) for i in range(ROWS)]
    batch = finish(engine_of(SAMPLED_TARGET, LENGTH).start(requests))
    observed = np.zeros((VOCAB,) * LENGTH)
    np.add.at(observed, tuple(np.array(completions(batch, requests)).T), 1)
    joint = ReferenceDecoder(SAMPLED_TARGET).joint(prompt, LENGTH, params)
    assert chi_square(observed, joint) > P_VALUE
    for axes in [(1, 2), (0, 2), (0, 1)]:
        assert chi_square(observed.sum(axes), joint.sum(axes)) > P_VALUE
