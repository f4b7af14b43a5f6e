"""Processors that the battery leaves out: thousands of seeded rows follow the target."""

import functools
import itertools

import numpy as np
import pytest

from spec_jax.config import SamplingParams
from spec_jax.testing import ReferenceDecoder, tiny_model
from tests.harness import chi_square, make_engine, request, run
from tests.often import often

ROWS, LENGTH, VOCAB = 8192, 3, 8
P_VALUE = 1e-6
TARGET = tiny_model(0, vocab_size=VOCAB, embed_size=16, num_layers=1)
DRAFT = tiny_model(1, vocab_size=VOCAB, embed_size=16, num_layers=1)
PROMPT = [1, 2, 1, 3, 1]

SETTINGS = {
    "cool": SamplingParams(
        max_tokens=LENGTH, temperature=0.7, top_p=0.9, repetition_penalty=1.3, logit_bias={2: 1.0}
    ),
    "warm": SamplingParams(
        max_tokens=LENGTH, temperature=1.6, top_k=5, min_p=0.05, presence_penalty=0.5
    ),
}


BAD_WORDS = {"warm": [(4,), (1, 6), (5, 2, 0)]}
"""Token sequences that a setting forbids as well."""


@functools.cache
def engine_of(method):
    return make_engine(method, TARGET, DRAFT, lookahead=LENGTH)


CASES = list(itertools.product(("other", "prompt_lookup"), SETTINGS))


@pytest.mark.slow
@pytest.mark.parametrize(("method", "setting"), often(CASES, [("prompt_lookup", "warm")]))
def test_the_first_tokens_have_the_targets_joint_distribution(method, setting):
    params, words = SETTINGS[setting], BAD_WORDS.get(setting, ())
    requests = [request(PROMPT, params, bad_words=words, seed=i) for i in range(ROWS)]
    rows = run(engine_of(method), requests)
    observed = np.zeros((VOCAB,) * LENGTH)
    np.add.at(observed, tuple(np.array(rows).T), 1)
    joint = ReferenceDecoder(TARGET).joint(PROMPT, LENGTH, params, bad_words=words)
    assert chi_square(observed, joint) > P_VALUE
    for axes in [(1, 2), (0, 2), (0, 1)]:
        assert chi_square(observed.sum(axes), joint.sum(axes)) > P_VALUE
