"""Verification by equal tokens, against the rules where all mass of p is on one token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.decoding.verify import RULES, draw_target_tokens, verify, verify_equal
from spec_jax.drafters.base import Draft
from spec_jax.sampling.draw import draw
from spec_jax.sampling.probabilities import likeliest

VOCAB, STEPS, ROWS = 3, 3, 2000


def drafted(num_drafts):
    """Drafts of many rows, and the target's likeliest token after each prefix; -1 is none."""
    rng = np.random.default_rng(num_drafts)
    tokens = rng.integers(0, VOCAB, (ROWS, STEPS, num_drafts))
    if num_drafts > 1:  # a draft may end before the others
        ended = rng.integers(1, 3 * STEPS, (ROWS, num_drafts))
        tokens[np.arange(STEPS)[None, :, None] >= ended[:, None]] = -1
    after = rng.integers(0, VOCAB, (ROWS, 2 * (VOCAB + 1) ** STEPS))
    after[rng.random(after.shape) < 0.05] = -1
    prefix = np.zeros((ROWS, num_drafts), int)
    targets = [np.take_along_axis(after, prefix[:, :1], 1)]
    for step in range(STEPS):  # drafts with a common prefix have one token after it
        prefix = prefix * (VOCAB + 1) + tokens[:, step] + 2
        targets.append(np.take_along_axis(after, prefix, 1))
    lengths = rng.integers(0, STEPS + 1, ROWS)
    draft = Draft(
        jnp.asarray(tokens.reshape(ROWS, -1), jnp.int32),
        None,
        jnp.asarray(lengths, jnp.int32),
        num_drafts=num_drafts,
    )
    return draft, jnp.asarray(np.concatenate(targets, 1), jnp.int32)


@pytest.mark.parametrize(
    ("rule", "num_drafts"), [*((rule, 1) for rule in RULES), ("token", 2), ("token", 3)]
)
def test_it_decides_like_every_rule(rule, num_drafts):
    draft, targets = drafted(num_drafts)
    p = jax.nn.one_hot(targets, VOCAB)
    expected = verify(rule, p, draft, jax.random.split(jax.random.key(0), ROWS))
    verified = jax.jit(verify_equal)(targets, draft)
    for name in ("accepted", "draft_index", "valid"):
        np.testing.assert_array_equal(getattr(verified, name), getattr(expected, name), name)
    is_valid = np.asarray(expected.valid)
    np.testing.assert_array_equal(verified.token[is_valid], expected.token[is_valid])
    assert set(np.unique(expected.accepted)) == set(range(STEPS + 1))
    assert 0 < is_valid.sum() < ROWS


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_no_token_is_likeliest_where_there_is_no_distribution(bad):
    logits = jnp.asarray([[0.0, 3.0, 3.0], [bad, bad, bad], [-np.inf, 1.0, -np.inf]])
    assert likeliest(logits).tolist() == [1, -1, 1]


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_drafts_share_the_random_numbers_of_a_step(num_drafts):
    batch, vocab = 200, 50
    keys = jax.random.split(jax.random.key(0), (batch, STEPS + 1))
    p = np.random.default_rng(0).random((batch, STEPS + 1, vocab)).astype(np.float32)
    p[7, 1] = 0  # no distribution
    several = np.concatenate([p[:, :1], np.repeat(p[:, 1:], num_drafts, axis=1)], axis=1)
    tokens = np.asarray(draw_target_tokens(jnp.asarray(several), keys, num_drafts))
    after = tokens[:, 1:].reshape(batch, STEPS, num_drafts)
    assert (after == after[..., :1]).all() and (tokens[7, 1 : 1 + num_drafts] == -1).all()
    for step in range(STEPS + 1):
        expected = draw(keys[:, step], jnp.asarray(p[:, step]))
        at = 0 if not step else 1 + (step - 1) * num_drafts
        drawn = tokens[:, at] >= 0
        np.testing.assert_array_equal(tokens[drawn, at], np.asarray(expected)[drawn])
        assert len(set(tokens[:, at])) > vocab / 2
