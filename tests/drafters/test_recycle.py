"""Token recycling drafts what the target found likeliest before, in outputs of one tenant only."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_jax import LLM, SamplingParams, SpeculativeConfig
from spec_jax.decoding.draft_length import Constant
from spec_jax.drafters.base import Committed, Context, DrafterPrompt
from spec_jax.drafters.recycle import NUM_ENTRIES, TokenRecycling
from spec_jax.engine.engine import Engine
from spec_jax.pytree import pytree
from spec_jax.sampling.parameters import BatchSampling
from spec_jax.testing import ReferenceDecoder
from tests.checkpoints import tiny
from tests.harness import TARGET, finish, make_engine, request, run
from tests.often import often

CAPACITY, LOOKAHEAD, VOCAB = 24, 4, 6


def hash_of(ngram):
    hashed = 2166136261
    for token in reversed(ngram):
        hashed = ((hashed ^ token) * 2654435769) % 2**32
        hashed ^= hashed >> 15
    return hashed


class Table:
    """A row's table, in plain Python."""

    def __init__(self, max_ngram):
        self.max_ngram, self.entries = max_ngram, {}

    def add(self, text, following):
        """Adds a text; an n-gram with -1 in it, or before it, is none."""
        for end, token in enumerate(following):
            for size in range(1, self.max_ngram + 1):
                ngram = tuple(text[end + 1 - size : end + 1])
                if len(ngram) == size <= end + 1 and min(*ngram, token, 0) == 0:
                    self.entries[hash_of(ngram) % NUM_ENTRIES] = ngram, token

    def draft(self, text, lookahead):
        text, drafted = list(text), []
        while len(drafted) < lookahead:
            for size in range(min(self.max_ngram, len(text)), 0, -1):
                ngram = tuple(text[-size:])
                entry = self.entries.get(hash_of(ngram) % NUM_ENTRIES)
                if entry is not None and entry[0] == ngram:
                    break
            else:
                break
            text.append(entry[1])
            drafted.append(entry[1])
        return drafted


tokens_ = st.integers(0, VOCAB - 1)
likeliest_ = st.integers(-1, VOCAB - 1)
rounds_ = st.tuples(
    st.lists(tokens_, min_size=LOOKAHEAD, max_size=LOOKAHEAD),
    st.lists(likeliest_, min_size=LOOKAHEAD + 1, max_size=LOOKAHEAD + 1),
    st.integers(0, LOOKAHEAD),
)
row_ = st.tuples(
    st.lists(tokens_, min_size=1, max_size=8),
    st.lists(st.lists(tokens_, min_size=1, max_size=5), max_size=3),
    st.lists(rounds_, min_size=3, max_size=3),
)


@jax.jit
def init(drafter, tokens, lengths, inputs):
    return drafter.init(DrafterPrompt(tokens, lengths, inputs))


@jax.jit
def commit(drafter, state, committed):
    return drafter.commit(state, committed)


@functools.partial(jax.jit, static_argnames="varies")
def propose(drafter, state, tokens, lengths, varies):
    context = Context(
        tokens=tokens,
        lengths=lengths,
        prompt_lengths=lengths,
        keys=jax.random.split(jax.random.key(0), len(lengths)),
        sampling=BatchSampling.stack([SamplingParams()] * len(lengths), VOCAB),
        limits=jnp.full((len(lengths),), LOOKAHEAD, jnp.int32),
        fixed_length=not varies,
    )
    draft = drafter.propose(state, context)[0]
    assert draft.probs is None  # deterministic: q is one-hot
    return draft.tokens, draft.lengths


@pytest.mark.parametrize("max_ngram", [1, 3])
@given(rows=st.lists(row_, min_size=3, max_size=3), varies=st.booleans())
def test_rounds_agree_with_plain_python(max_ngram, rows, varies):
    drafter = TokenRecycling(LOOKAHEAD, max_ngram)
    tokens = np.full((3, CAPACITY), 5, np.int32)
    past = np.full((3, 18), -1, np.int32)
    tables = [Table(max_ngram) for _ in rows]
    texts = [list(prompt) for prompt, _, _ in rows]
    for i, (prompt, outputs, _) in enumerate(rows):
        tokens[i, : len(prompt)] = prompt
        joined = [token for output in outputs for token in (*output, -1)]
        past[i, : len(joined)] = joined
        for text in (*outputs, prompt):
            tables[i].add(text[:-1], text[1:])
    lengths = jnp.asarray([len(text) for text in texts], jnp.int32)
    state = init(drafter, jnp.asarray(tokens), lengths, jnp.asarray(past))
    for at in range(3):
        found = propose(drafter, state, jnp.asarray(tokens), lengths, varies)
        drafts = [row[:count].tolist() for row, count in zip(*map(np.asarray, found), strict=True)]
        assert drafts == [
            table.draft(text, LOOKAHEAD) for table, text in zip(tables, texts, strict=True)
        ]
        before, scored, likeliest = lengths, [], []
        for i, (_, _, rounds) in enumerate(rows):
            drafted, said, accepted = rounds[at]
            scored.append([texts[i][-1], *drafted])
            likeliest.append(said)
            tables[i].add([*texts[i], *drafted], [-1] * (len(texts[i]) - 1) + said)
            texts[i] += [*drafted[:accepted], 0]
            tokens[i, : len(texts[i])] = texts[i]
        lengths = jnp.asarray([len(text) for text in texts], jnp.int32)
        committed = Committed(
            jnp.asarray(tokens),
            before,
            lengths,
            jnp.zeros_like(lengths),
            scored_tokens=jnp.asarray(scored, jnp.int32),
            likeliest=jnp.asarray(likeliest, jnp.int32),
        )
        state = commit(drafter, state, committed)


def test_the_table_of_a_long_text_keeps_the_latest_of_two_ngrams_in_one_place():
    text = np.random.default_rng(0).integers(0, 131_072, (1, 9000)).astype(np.int32)
    table = Table(3)
    table.add(text[0, :-1].tolist(), text[0, 1:].tolist())
    state = init(TokenRecycling(LOOKAHEAD), text, jnp.array([9000], jnp.int32), None)
    places = sorted(table.entries)
    assert len(places) > NUM_ENTRIES * 3 // 4
    following = np.asarray(state.following[0])
    assert following[places].tolist() == [table.entries[place][1] for place in places]
    hashes = [hash_of(table.entries[place][0]) for place in places]
    assert np.asarray(state.hashes[0])[places].tolist() == hashes
    assert (np.delete(following, places) == -1).all()


@pytree
class Recording(TokenRecycling):
    """Keeps what it is told at each round's end."""

    def init(self, prompt):
        shape = prompt.tokens.shape[0], self.lookahead + 1
        return jnp.full(shape, -1, jnp.int32), jnp.full(shape, -1, jnp.int32)

    def propose(self, state, context):
        draft, _ = super().propose(super().init(prompt_of(context)), context)
        return draft, state

    def commit(self, state, committed):
        told = committed.scored_tokens, committed.likeliest
        missing = self.lookahead + 1 - told[0].shape[1]
        return tuple(jnp.pad(each, ((0, 0), (0, missing)), constant_values=-1) for each in told)


def prompt_of(context):
    return DrafterPrompt(context.tokens, context.lengths)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("scoring", often(["block", "prefix_batch"], ["block"]))
def test_a_drafter_is_told_the_targets_likeliest_token_at_every_scored_place(temperature, scoring):
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    policy = Constant(LOOKAHEAD)
    engine = Engine(TARGET, Recording(LOOKAHEAD), policy, scoring=scoring, max_model_len=128)
    params = SamplingParams(max_tokens=6, temperature=temperature)
    batch = engine.start([request(prompt, params), request([4], params)])
    batch.advance(1)
    scored, likeliest = (np.asarray(each) for each in batch.state.drafter)
    assert scored[0].tolist() == [2, 3, 1, 2, 3]
    reference = ReferenceDecoder(TARGET)
    for place in range(LOOKAHEAD + 1):
        logits = reference.logits([*prompt, *scored[0, 1 : place + 1].tolist()])
        assert likeliest[0, place] == np.argmax(logits)
    assert scored[1, 0] == 4 and likeliest[1, 0] == np.argmax(reference.logits([4]))
    assert (likeliest[1, 1:] == -1).all()  # nothing follows 4 in this text


def test_a_row_that_has_ended_learns_nothing():
    engine = make_engine("recycle", TARGET)
    short, long = SamplingParams(max_tokens=2), SamplingParams(max_tokens=30)
    batch = engine.start([request([1, 2], short), request([3, 4], long)])
    batch.advance(4)
    before = jax.tree.map(lambda leaf: np.asarray(leaf)[0], batch.state.drafter)
    finish(batch)
    after = jax.tree.map(lambda leaf: np.asarray(leaf)[0], batch.state.drafter)
    jax.tree.map(np.testing.assert_array_equal, before, after)


PROMPTS = ["the thin thing in the", "a", "and then the end of the the the"]
# The penalty keeps a tiny model from repeating itself, so that drafts come from past outputs.
GREEDY = SamplingParams(max_tokens=32, ignore_eos=True, repetition_penalty=1.5)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "target"
    return LLM(str(tiny.write_directory(path, tiny.CONFIG, tiny.llama_tensors(tiny.CONFIG))))


def test_a_namespace_learns_from_its_outputs_alone(plain):
    config = SpeculativeConfig(method="recycle", draft_length_policy="constant")
    expected = [each.token_ids for each in plain.generate(PROMPTS, GREEDY)]
    llm = plain.with_speculation(config)
    theirs = dataclasses.replace(GREEDY, namespace="theirs")
    passes = [llm.generate(PROMPTS, params) for params in (GREEDY, theirs, GREEDY)]
    for outputs in passes:
        assert [each.token_ids for each in outputs] == expected
    first, other, second = ([each.metrics.rounds for each in outputs] for outputs in passes)
    assert first == other and all(a < b / 2 for a, b in zip(second, first, strict=True))
    assert run(make_engine("recycle", TARGET), [request([1, 2])])
