"""What a draft reads of its target: the target's own states, at every round, wherever rows are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.config import SamplingParams
from spec_jax.decoding.lookahead import Confidence, Constant, Heuristic
from spec_jax.drafters.features import FeatureDraft
from spec_jax.engine import Engine
from spec_jax.testing import tiny_model
from tests.harness import request

K = 3
TARGET = tiny_model(0)
DRAFT = tiny_model(3, num_layers=1, reads_states=True)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9] * 4]


@jax.jit
def whole_text(tokens):
    """The draft's states and cache of a text beside the target's states, both read at once."""
    batch = tokens[None]
    states, _ = TARGET.begin(batch, TARGET.new_cache(*batch.shape), TARGET.config.num_layers)
    before = jnp.pad(states, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    cache = DRAFT.new_cache(1, len(tokens) + K)
    _, own, cache = DRAFT.score_and_states(batch, cache, states=before)
    return own, cache


def expected(text, drafted):
    """The draft's distributions after a text and after each of its drafted tokens but the last."""
    padded = np.zeros(-(-len(text) // 16) * 16, np.int32)
    padded[: len(text)] = text
    own, cache = whole_text(jnp.asarray(padded))
    own = own[:, len(text) - 1 : len(text)]
    found = [np.asarray(jax.nn.softmax(DRAFT.exit(own)[0, 0]))]
    for i, token in enumerate(drafted[:-1]):
        cache = cache.with_lengths(jnp.array([len(text) + i], jnp.int32))
        tokens = jnp.array([[token]], jnp.int32)
        logits, own, cache = DRAFT.score_and_states(tokens, cache, states=own)
        found.append(np.asarray(jax.nn.softmax(logits[0, 0])))
    return np.stack(found)


@pytest.mark.parametrize(
    "policy", [Constant(K), Heuristic(K, start=1), Confidence(K, 0.2)], ids=lambda each: str(each)
)
def test_it_reads_the_targets_states(policy):
    drafts = []
    engine = Engine(TARGET, FeatureDraft(DRAFT, K), policy, max_model_len=128)
    params = SamplingParams(max_tokens=24, temperature=1.0)
    requests = [request(each, params, seed=i) for i, each in enumerate(PROMPTS)]
    batch = engine.start(requests, on_draft=drafts.append)
    compared = 0
    while batch.running:
        texts = [
            row[:n].tolist() for row, n in zip(batch.view.tokens, batch.view.lengths, strict=True)
        ]
        batch.advance(1)
        draft = drafts[-1]
        for row in range(len(PROMPTS)):
            count = int(draft.lengths[row])
            if count:
                wanted = expected(texts[row], np.asarray(draft.tokens[row, :count]))
                np.testing.assert_allclose(draft.probs[row, :count], wanted, atol=2e-5)
                compared += count
    assert compared > 50
