"""The reference decoder at the size of real vocabularies."""

import tracemalloc

import numpy as np

from spec_jax.config import SamplingParams
from spec_jax.evaluation.reference import one_hot, reference_probabilities

VOCAB = 131_072


def test_certainty_takes_the_memory_of_one_distribution():
    """And not of a matrix of all, which is 128 GiB."""
    logits = np.random.default_rng(0).normal(size=VOCAB)
    tracemalloc.start()
    p = reference_probabilities(logits, [1, 2], 2, SamplingParams(temperature=0.0))
    rows = one_hot(np.array([[7, 8, VOCAB - 1]]), VOCAB)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 16 * 8 * VOCAB
    assert p.sum() == p[logits.argmax()] == 1
    assert rows.shape == (1, 3, VOCAB) and (rows.argmax(-1) == [7, 8, VOCAB - 1]).all()
    assert (rows.sum(-1) == 1).all()
