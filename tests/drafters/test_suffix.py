"""Suffix lookup copies the likeliest continuation of the longest match, and of one tenant only."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_jax.config import SamplingParams
from spec_jax.decoding.draft_length import Constant
from spec_jax.drafters.base import Context, DrafterPrompt
from spec_jax.drafters.suffix import MAX_OCCURRENCES, StoredText, SuffixLookup
from spec_jax.engine.engine import Engine
from spec_jax.engine.suffix_index import SuffixIndex
from spec_jax.engine.suffix_store import StoredOutputs
from spec_jax.sampling.parameters import BatchSampling
from spec_jax.testing import ReferenceDecoder
from tests.decoding.test_sampled import LENGTH, P_VALUE, ROWS, SETTINGS, VOCAB
from tests.decoding.test_sampled import PROMPT as SAMPLED_PROMPT
from tests.decoding.test_sampled import TARGET as SAMPLED_TARGET
from tests.harness import TARGET, chi_square, completions, finish, request, run
from tests.often import often
from tests.sharding import test_meshes as meshes

BATCH, CAPACITY, SIZE = 4, 20, 96
CHOICES = [(1, 2), (3, 3), (5, 16), (30, 4)]
each_choice = pytest.mark.parametrize(("lookahead", "max_ngram"), CHOICES)

rows_of_few_words = st.one_of(
    *[st.lists(st.integers(0, top), min_size=1, max_size=CAPACITY) for top in (1, 2, 5)]
)
outputs_of_few_words = st.one_of(
    *[
        st.lists(st.lists(st.integers(0, top), min_size=1, max_size=30), max_size=4)
        for top in (1, 2, 5)
    ]
)


def in_common(one, other):
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def look_up(known, sources, lookahead, max_ngram):
    """The draft for one row, in plain Python; of equal matches the first source's counts."""
    for size in range(min(max_ngram, len(known)), 1, -1):
        wanted = known[-size:]

        def after(text, size=size, wanted=wanted):
            starts = range(len(text) - size)  # the last place has no continuation
            return [text[i + size :] for i in starts if text[i : i + size] == wanted]

        own = after(known)
        if own:
            return own[0][:lookahead]
        for outputs in sources:
            past = sorted(text for output in outputs for text in after(output))
            if not past:
                continue
            if len(past) > MAX_OCCURRENCES:
                spread = [
                    (2 * i + 1) * len(past) // (2 * MAX_OCCURRENCES) for i in range(MAX_OCCURRENCES)
                ]
                past = [past[i] for i in spread]
            past = [text[:lookahead] for text in past]
            return max(past, key=lambda text: sum(in_common(text, other) for other in past))
    return []


@jax.jit
def propose(drafter, context, inputs):
    state = drafter.init(DrafterPrompt(context.tokens, context.lengths, inputs))
    return drafter.propose(state, context)[0]


def drafts(rows, index, namespaces, lookahead, max_ngram, junk=0, stored=None):
    """The drafter's proposals for a batch whose buffers hold junk past each row's end."""
    tokens = np.broadcast_to(np.asarray(junk, np.int32), (len(rows), CAPACITY)).copy()
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    lengths = jnp.asarray([len(row) for row in rows], jnp.int32)
    context = Context(
        tokens=jnp.asarray(tokens),
        lengths=lengths,
        prompt_lengths=jnp.minimum(lengths, 2),
        keys=jax.random.split(jax.random.key(0), len(rows)),
        sampling=BatchSampling.stack([SamplingParams()] * len(rows), 6),
        limits=jnp.full((len(rows),), lookahead, jnp.int32),
    )
    inputs = tuple(map(jnp.asarray, index.arrays(namespaces, len(rows))))
    text = None
    if stored is not None:
        inputs += (jnp.asarray(stored.of_rows(namespaces, len(rows))),)
        text = StoredText(jnp.asarray(stored.tokens), jnp.asarray(stored.order))
    draft = propose(SuffixLookup(lookahead, max_ngram, text), context, inputs)
    assert draft.probs is None  # deterministic: q is one-hot
    assert draft.tokens.shape == (len(rows), lookahead)
    pairs = zip(np.asarray(draft.tokens), np.asarray(draft.lengths), strict=True)
    return [row[:length].tolist() for row, length in pairs]


def index_of(**outputs):
    index = SuffixIndex(capacity=SIZE)
    for namespace, several in outputs.items():
        for output in several:
            index.add(namespace, output)
    return index


def kept(outputs):
    """The outputs that an index has room for."""
    while sum(len(output) + 1 for output in outputs) > SIZE:
        outputs = outputs[1:]
    return outputs


@each_choice
@given(
    rows=st.lists(rows_of_few_words, min_size=BATCH, max_size=BATCH),
    ours=outputs_of_few_words,
    theirs=outputs_of_few_words,
    stored_by_us=outputs_of_few_words,
    stored_by_them=outputs_of_few_words,
)
def test_ragged_batches_of_two_tenants_agree_with_plain_python(
    lookahead, max_ngram, rows, ours, theirs, stored_by_us, stored_by_them
):
    """Each draft copies the outputs of its tenant alone, with a store and without one."""
    index = index_of(ours=ours, theirs=theirs)
    namespaces = ["ours", "theirs", "theirs", "ours"]
    sources = {"ours": [kept(ours)], "theirs": [kept(theirs)]}
    store = SuffixIndex(capacity=2 * SIZE)
    for namespace, outputs in (("ours", stored_by_us), ("theirs", stored_by_them)):
        for output in outputs:
            store.add(namespace, output)
    for stored in (None, StoredOutputs.of(store)):
        expected = [
            look_up(row, sources[namespace], lookahead, max_ngram)
            for row, namespace in zip(rows, namespaces, strict=True)
        ]
        assert drafts(rows, index, namespaces, lookahead, max_ngram, 0, stored) == expected
        sources["ours"].append(stored_by_us)
        sources["theirs"].append(stored_by_them)


@each_choice
@given(row=rows_of_few_words, outputs=outputs_of_few_words)
def test_tokens_past_the_end_of_a_row_are_never_used(lookahead, max_ngram, row, outputs):
    junk = np.stack(
        [
            np.resize(each, CAPACITY)
            for each in (row, row[-max_ngram:], [5, *row], [*outputs[0], 0] if outputs else [3])
        ]
    )
    expected = look_up(row, [kept(outputs)], lookahead, max_ngram)
    index = index_of(ours=outputs)
    found = drafts([row] * BATCH, index, ["ours"] * BATCH, lookahead, max_ngram, junk)
    assert found == [expected] * BATCH


@pytest.mark.parametrize(
    ("known", "outputs", "expected"),
    [
        pytest.param([1, 2], [[0, 1, 2, 3, 4]], [3, 4], id="cut at the end of the output"),
        pytest.param([5, 1, 2], [[1, 2, 3], [5, 1, 2, 4]], [4], id="the longest match"),
        pytest.param([1, 2], [[1, 2, 3], [1, 2, 4], [1, 2, 4]], [4], id="the likeliest"),
        pytest.param([1, 2], [[1, 2], [3, 3], [4]], [], id="outputs are not one text"),
        pytest.param([1, 2], [[1, 2], [1, 2], [1, 2, 3]], [3], id="an end says nothing"),
        pytest.param([5, 1, 2], [[5, 1, 2], [1, 2, 3]], [3], id="the longest that goes on"),
        pytest.param([3], [[3, 4], [3, 4]], [], id="one token is too few"),
        pytest.param([0, 0], [[0, 0, 0]], [0], id="token zero is a token"),
        pytest.param([1, 2, 0, 1, 2], [[1, 2, 3]], [0, 1, 2], id="the row itself if equal"),
        pytest.param([1, 2, 0, 4, 1, 2], [[4, 1, 2, 3]], [3], id="others if longer"),
        pytest.param([1, 2, 3], [], [], id="nothing stored"),
    ],
)
def test_worked_examples(known, outputs, expected):
    assert look_up(known, [outputs], 3, 4) == expected
    assert drafts([known], index_of(ours=outputs), ["ours"], 3, 4, junk=known[-1]) == [expected]


def test_a_continuation_that_most_share_for_longer_is_preferred():
    """Each begins with a different token more often, but further on only one is agreed upon."""
    outputs = [[1, 2, 3, 0], [1, 2, 3, 1], [1, 2, 3, 2], [1, 2, 4, 5, 5], [1, 2, 4, 5, 5]]
    assert drafts([[1, 2]], index_of(ours=outputs), ["ours"], 3, 4) == [[4, 5, 5]]
    assert drafts([[1, 2]], index_of(ours=outputs), ["ours"], 1, 4) == [[3]]


def test_what_one_tenant_said_is_never_proposed_to_another():
    secret = [5, 4, 3, 5, 2, 0, 5, 1, 1, 3]
    index = index_of(theirs=[secret] * 3)
    prefixes = [secret[:size] for size in range(2, len(secret))]
    for namespace in ("ours", "", "their", "theirs "):
        tenants = [namespace] * len(prefixes)
        assert drafts(prefixes, index, tenants, 4, 16) == [[]] * len(prefixes)
    tenants = ["theirs"] * len(prefixes)
    expected = [secret[len(prefix) :][:4] for prefix in prefixes]
    assert drafts(prefixes, index, tenants, 4, 16) == expected


def engine_over(target, index, lookahead, stored=None):
    """An engine that searches an index, and a store, as `LLM` makes it from the method's name."""
    text = None
    if stored is not None:
        text = StoredText(*map(target.replicated, (stored.tokens, stored.order)))

    def inputs(requests, shape):
        namespaces = [each.sampling.namespace for each in requests]
        parts = () if stored is None else (stored.of_rows(namespaces, shape.batch),)
        return *index.arrays(namespaces, shape.batch), *parts

    drafter = SuffixLookup(lookahead, stored=text)
    return Engine(target, drafter, Constant(lookahead), max_model_len=512, inputs=inputs)


@pytest.mark.slow
def test_greedy_tokens_are_the_targets_own_and_come_in_fewer_rounds_the_second_time():
    index = SuffixIndex(capacity=256)
    engine = engine_over(TARGET, index, 6)
    prompts = [[3], [1, 2, 3, 4, 5, 1, 2], [7, 7, 7, 7]]
    # The penalty keeps a tiny model from repeating itself, which would be drafted from at once.
    params = SamplingParams(max_tokens=40, repetition_penalty=1.3)
    requests = [request(prompt, params) for prompt in prompts]
    expected = [ReferenceDecoder(TARGET).greedy(prompt, params)[0] for prompt in prompts]
    rounds = []
    for _ in range(2):
        batch = finish(engine.start(requests))
        outputs = completions(batch, requests)
        assert outputs == expected
        rounds.append(np.asarray(batch.state.counters.rounds)[:3])
        for output in outputs:
            index.add("", output)
    # 40 tokens are 6 rounds of 7, after those that it takes to recognise the first tokens.
    assert (rounds[1] < rounds[0]).all() and rounds[1].max() <= 10


@pytest.mark.slow
def test_rows_spread_over_a_mesh_look_in_their_own_namespaces():
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 64, size).tolist() for size in (8, 3, 21)]
    params = [SamplingParams(max_tokens=16, namespace=each) for each in ("a", "b", "a")]
    requests = [request(*each) for each in zip(prompts, params, strict=True)]
    index, store = SuffixIndex(capacity=64), SuffixIndex(capacity=64)

    def decode(target):
        stored = StoredOutputs.of(store)
        batch = finish(engine_over(target, index, 3, stored).start(requests))
        return completions(batch, requests), np.asarray(batch.state.counters.rounds).tolist()

    alone, _ = decode(meshes.TARGET)
    for output, each in zip(alone, params, strict=True):
        index.add(each.namespace, output)
    expected = decode(meshes.TARGET)
    assert expected[0] == alone
    spread, _ = meshes.placed("mixed-4")
    assert decode(spread) == expected
    for output, each in zip(alone, params, strict=True):
        store.add(each.namespace, output)
    index.clear()
    fewer = decode(meshes.TARGET)
    assert fewer[0] == alone and sum(fewer[1]) < 48
    assert decode(spread) == fewer


@functools.cache
def sampling_engine():
    index = SuffixIndex(capacity=32)
    for output in ([3, 1, 5, 6, 7], [2, 1, 3, 1, 4, 4, 4], [1, 4, 2, 2], [4, 0, 1], [1, 0, 6]):
        index.add("", output)
    return engine_over(SAMPLED_TARGET, index, LENGTH)


@pytest.mark.slow
@pytest.mark.parametrize("setting", often(SETTINGS, ["warm"]))
def test_sampled_tokens_have_the_targets_joint_distribution(setting):
    params = SETTINGS[setting]
    requests = [request(SAMPLED_PROMPT, params, seed=i) for i in range(ROWS)]
    batch = finish(sampling_engine().start(requests))
    assert int(batch.state.counters.accepted.sum()) > ROWS // 50
    observed = np.zeros((VOCAB,) * LENGTH)
    np.add.at(observed, tuple(np.array(completions(batch, requests)).T), 1)
    joint = ReferenceDecoder(SAMPLED_TARGET).joint(SAMPLED_PROMPT, LENGTH, params)
    assert chi_square(observed, joint) > P_VALUE


def test_an_engine_that_does_not_say_what_to_look_in_is_refused():
    engine = Engine(TARGET, SuffixLookup(2), Constant(2), max_model_len=512)
    with pytest.raises(ValueError, match="past outputs"):
        run(engine, [request([1, 2])])
