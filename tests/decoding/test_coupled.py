"""Coupled verification: the draft draws with the random numbers of the target."""

import dataclasses

import pytest

from spec_jax.config import SamplingParams
from spec_jax.testing import tiny_model
from tests.harness import finish, make_engine, request, run
from tests.often import often

TARGET = tiny_model(0, vocab_size=50, embed_size=16, num_layers=2)
DRAFT = tiny_model(1, vocab_size=50, embed_size=16, num_layers=1)
WARM = SamplingParams(max_tokens=30, temperature=1.0, top_p=0.95)
REQUESTS = [request([1, 2, 3, i], WARM, seed=i) for i in range(4)]


@pytest.fixture(scope="module")
def plain():
    return run(make_engine("none", TARGET), REQUESTS)


def test_a_draft_by_the_target_itself_is_accepted_in_full(plain):
    """If one random number of draft and target differed, about half of the tokens would."""
    engine = make_engine("self", TARGET, lookahead=3, verification="coupled")
    batch = finish(engine.start(REQUESTS))
    assert batch.state.counters.accepted.tolist() == batch.state.counters.drafted.tolist()
    assert (batch.state.counters.drafted > 20).all()
    assert run(engine, REQUESTS) == plain


def test_another_model_is_accepted_as_often_as_coupling_can():
    """If a of q's tokens pass rejection sampling, at least a / (2 - a) are equal."""
    requests = [request([1, 2, 3, seed % 7], WARM, seed=seed) for seed in range(64)]

    def rate(verification):
        engine = make_engine("other", TARGET, DRAFT, lookahead=1, verification=verification)
        counters = finish(engine.start(requests)).state.counters
        return float(counters.accepted.sum() / counters.drafted.sum())

    coupled, rejecting = rate("coupled"), rate("token")
    assert 0.9 * rejecting / (2 - rejecting) < coupled < 1.1 * rejecting, (coupled, rejecting)


@pytest.mark.parametrize("method", often(["other", "tree", "lookup_tree"], ["tree"]))
def test_a_token_without_a_distribution_ends_the_row_as_in_plain_decoding(method):
    banned = {token: float("-inf") for token in range(50)}
    params = dataclasses.replace(WARM, logit_bias=banned)
    failing = [REQUESTS[0], request([1, 2], params, seed=9)]
    engine = make_engine(method, TARGET, DRAFT, lookahead=3, verification="coupled")
    fine, failed = run(engine, failing)
    assert failed == [] and fine == run(make_engine("none", TARGET), failing)[0]
