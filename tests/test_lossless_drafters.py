"""Drafters from outside of the package: exact ones pass `check_lossless`, and bugs are found.

A drafter here imports public names alone, as a user's file does.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from spec_jax import SpeculativeConfig
from spec_jax.drafters import (
    Draft,
    Drafter,
    History,
    autoregress,
    draw,
    probabilities,
    pytree,
    static,
)
from spec_jax.testing import check_lossless
from tests.often import often

VOCAB, K, SAMPLES = 8, 3, 1024
TABLE = jax.random.normal(jax.random.key(0), (VOCAB, VOCAB), jnp.float32) * 2
"""Logits of the token after each token: a static table of bigrams."""


@pytree
class Table(Drafter):
    """Draws tokens from a table of bigrams, with the request's processors, and reports q."""

    logits: jax.Array
    lookahead: int = static()
    fixed_length = True

    def init(self, prompt):
        return None

    def propose(self, state, context):
        last = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)

        def step(carry, i, drawn):
            carry = jnp.where(i == 0, carry, drawn)
            return self.logits[carry], carry

        draft, _ = autoregress(step, last, context, lookahead=self.lookahead)
        return self.reported(draft, context), state

    def reported(self, draft, context):
        return draft

    def commit(self, state, committed):
        return state


@pytree
class Counts(Drafter):
    """Drafts the token that most often followed the last one in the row; counts are its state."""

    lookahead: int = static()
    fixed_length = True

    def init(self, prompt):
        zeros = jnp.zeros((len(prompt.lengths), VOCAB, VOCAB), jnp.int32)
        return count(zeros, prompt.tokens, jnp.ones_like(prompt.lengths), prompt.lengths)

    def propose(self, state, context):
        last = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)[:, 0]
        tokens = []
        for _ in range(self.lookahead):
            last = jax.vmap(lambda counts, token: jnp.argmax(counts[token]))(state, last)
            last = last.astype(jnp.int32)
            tokens.append(last)
        lengths = jnp.full(last.shape, self.lookahead, jnp.int32)
        draft = Draft(tokens=jnp.stack(tokens, 1), probs=None, lengths=lengths)
        return draft, self.kept(state, draft)

    def kept(self, state, draft):
        return state

    def commit(self, state, committed):
        return count(state, committed.tokens, committed.before, committed.lengths)


def count(counts, tokens, begin, end):
    """Adds the pairs of each row whose second token stands from `begin` up to `end`."""
    place = jnp.arange(1, tokens.shape[1], dtype=jnp.int32)[None]
    inside = (place >= begin[:, None]) & (place < end[:, None])

    def add(counts, tokens, inside):
        return counts.at[tokens[:-1], tokens[1:]].add(inside.astype(jnp.int32))

    return jax.vmap(add)(counts, tokens, inside)


@pytree
class BlindToProcessors(Table):
    """Reports the softmax of its logits and not what it drew from."""

    def reported(self, draft, context):
        last = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)
        before = jnp.concatenate([last, draft.tokens[:, :-1]], axis=1)
        return dataclasses.replace(draft, probs=jax.nn.softmax(self.logits[before], axis=-1))


@pytree
class Argmax(Table):
    """Drafts the likeliest token of the q that it reports."""

    def propose(self, state, context):
        history = History.of(
            context.tokens, context.lengths, context.prompt_lengths, context.sampling
        )
        last = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)
        logits = jnp.repeat(self.logits[last], self.lookahead, axis=1)
        following = jnp.zeros((len(last), self.lookahead - 1), jnp.int32)
        q = probabilities(logits, context.sampling, history, following)
        tokens = jnp.argmax(q, axis=-1).astype(jnp.int32)
        lengths = jnp.full((len(last),), self.lookahead, jnp.int32)
        return Draft(tokens=tokens, probs=q, lengths=lengths), state


@pytree
class SharedKey(Argmax):
    """Draws all tokens of a draft with one random number."""

    def propose(self, state, context):
        draft, state = super().propose(state, context)
        tokens = [draw(context.keys, draft.probs[:, i]) for i in range(self.lookahead)]
        return dataclasses.replace(draft, tokens=jnp.stack(tokens, 1)), state


@pytree
class NotRolledBack(Counts):
    """Counts what it drafts, and keeps the counts of rejected tokens."""

    def kept(self, state, draft):
        lengths = jnp.full((len(draft.tokens),), self.lookahead, jnp.int32)
        return count(state, draft.tokens, jnp.ones_like(lengths), lengths)


@pytree
class Forgetful(Counts):
    """Does not count the tokens that a round has added."""

    def commit(self, state, committed):
        return state


@pytree
class ReadsNeighbours(Counts):
    """Looks up the counts of the row beside its own."""

    def propose(self, state, context):
        draft, _ = super().propose(jnp.roll(state, 1, axis=0), context)
        return draft, state


def table(kind):
    return lambda setting: kind(TABLE, setting.lookahead)


def counts(kind):
    return lambda setting: kind(setting.lookahead)


EXACT = {
    "table": (table(Table), {}),
    "table, block": (table(Table), {"verification": "block"}),
    "table, heuristic": (table(Table), {"draft_length_policy": "heuristic"}),
    "counts": (counts(Counts), {}),
    "counts, coupled": (counts(Counts), {"verification": "coupled"}),
    "argmax with softmax q, coupled": (table(Argmax), {"verification": "coupled"}),
}


@pytest.mark.parametrize("name", often(EXACT, []))
def test_an_exact_drafter_passes(name):
    factory, options = EXACT[name]
    options = {"verification": "token", "draft_length_policy": "constant", **options}
    config = SpeculativeConfig(method="custom", num_speculative_tokens=K, **options)
    report = check_lossless(factory, config, samples=SAMPLES)
    assert report.verdict == "PASS" and report.tests > 20


BUGS = {
    "q before the processors": (table(BlindToProcessors), "do not follow the reported q"),
    "argmax with softmax q": (table(Argmax), "do not follow the reported q"),
    "steps share a random number": (table(SharedKey), "or share random numbers"),
    "state not rolled back": (counts(NotRolledBack), "does not roll the drafter's state back"),
    "state not updated": (counts(Forgetful), "or loses tokens"),
    "neighbour's tokens read": (counts(ReadsNeighbours), "tokens change with its neighbours"),
}


@pytest.mark.parametrize("bug", often(BUGS, []))
def test_a_planted_bug_is_found(bug):
    factory, said = BUGS[bug]
    with pytest.raises(AssertionError, match="something is lost") as error:
        check_lossless(factory, samples=SAMPLES)
    assert said in str(error.value)


@pytree
class Silent(Counts):
    """Never drafts."""

    def propose(self, state, context):
        draft, state = super().propose(state, context)
        return dataclasses.replace(draft, lengths=jnp.zeros_like(draft.lengths)), state


@pytest.mark.slow
def test_a_drafter_that_drafts_nothing_was_not_tested():
    with pytest.raises(AssertionError, match="not tested, nothing was drafted"):
        check_lossless(counts(Silent), samples=64)
