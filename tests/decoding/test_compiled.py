"""What a round decides is the same compiled as a whole and operation by operation."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.config import SamplingParams
from spec_jax.decoding import loop
from spec_jax.decoding.verify import verify
from spec_jax.drafters.base import Draft
from spec_jax.sampling.draw import draw
from spec_jax.sampling.parameters import BatchSampling
from spec_jax.sampling.probabilities import probabilities
from spec_jax.sampling.processors import History
from tests.harness import DRAFT, TARGET, make_engine, request, run

ROWS, LOOKAHEAD, VOCAB = 4, 2, 131_072
SAMPLING = BatchSampling.stack(
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(temperature=1.3, top_k=50, repetition_penalty=1.2),
        SamplingParams(),
    ],
    VOCAB,
)
RANDOM = np.random.default_rng(0)


def logits(*shape):
    return jnp.asarray(4 * RANDOM.standard_normal((*shape, VOCAB), np.float32))


def tokens(*shape):
    return jnp.asarray(RANDOM.integers(0, VOCAB, shape, np.int32))


class TestSteps(chex.TestCase):
    """A fused reduction over a large vocabulary is where a compiler errs unseen."""

    @chex.variants(with_jit=True)
    def test_probabilities(self):
        text, lengths = tokens(ROWS, 16), jnp.asarray([16, 9, 12, 4], jnp.int32)
        scores, following = logits(ROWS, LOOKAHEAD + 1), tokens(ROWS, LOOKAHEAD)

        def step(scores, text, following):
            history = History.of(text, lengths, jnp.minimum(lengths, 4), SAMPLING)
            return probabilities(scores, SAMPLING, history, following)

        found = self.variant(step)(scores, text, following)
        chex.assert_trees_all_close(found, step(scores, text, following), rtol=1e-4, atol=1e-9)
        chex.assert_trees_all_close(found.sum(-1), jnp.ones((ROWS, LOOKAHEAD + 1)), rtol=1e-5)

    @chex.variants(with_jit=True)
    @pytest.mark.slow  # test_tails.py draws, and test_lossless.py verifies, compiled
    def test_verification_and_draws(self):
        p, q = (jax.nn.softmax(logits(2, count), -1) for count in (LOOKAHEAD + 1, LOOKAHEAD))
        keys = jax.random.split(jax.random.key(1), 2)
        drafted = jax.vmap(draw, in_axes=(None, 1), out_axes=1)(keys, q)
        draft = Draft(drafted, q, jnp.asarray([2, 1], jnp.int32))

        for rule in ("token", "block"):

            def step(p, draft, keys, rule=rule):
                return verify(rule, p, draft, keys), draw(keys, p[:, 0])

            found = self.variant(step)(p, draft, keys)
            chex.assert_trees_all_equal(found, step(p, draft, keys))


def test_the_engines_count_of_traces_misses_none(monkeypatch):
    """Chex counts by itself how often the loop is traced."""
    chex.clear_trace_counter()
    counted = chex.assert_max_traces(loop.decode, n=1)
    monkeypatch.setattr(loop, "decode", counted)
    engine = make_engine("other", TARGET, DRAFT)
    said = [run(engine, [request(prompt)]) for prompt in ([3, 5], [7], [9, 9, 4])]
    assert engine.traces == 2 and len(said) == 3
