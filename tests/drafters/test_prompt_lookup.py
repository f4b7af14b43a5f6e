"""Prompt lookup copies what Hugging Face's prompt lookup would copy, on device and in batches."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_jax.config import SamplingParams
from spec_jax.decoding.draft_length import Constant
from spec_jax.drafters.base import Context, DrafterPrompt
from spec_jax.drafters.prompt_lookup import PromptLookup
from spec_jax.engine.engine import Engine
from spec_jax.sampling.parameters import BatchSampling
from tests.harness import TARGET, completions, finish, request, run

BATCH, CAPACITY = 4, 24
SETTINGS = [(1, 1), (3, 1), (4, 2), (2, 3), (10, 2), (5, 9), (30, 3)]
each_setting = pytest.mark.parametrize(("lookahead", "max_ngram"), SETTINGS)

tokens_of_few_words = st.one_of(
    *[st.lists(st.integers(0, top), min_size=1, max_size=CAPACITY) for top in (1, 2, 5)]
)


def _look_up(known: Sequence[int], lookahead: int, max_ngram: int) -> list[int]:
    """The draft for one row, in plain Python."""
    length = len(known)
    for size in range(min(max_ngram, length - 1), 0, -1):
        wanted = known[length - size :]
        for start in range(length - size):  # leftmost first; the last place has no continuation
            if known[start : start + size] == wanted:
                return list(known[start + size : start + size + lookahead])
    return []


@jax.jit
def _propose(drafter: PromptLookup, context: Context):
    return drafter.propose(drafter.init(DrafterPrompt(context.tokens, context.lengths)), context)[0]


def _drafts(
    rows: Sequence[Sequence[int]], lookahead: int, max_ngram: int, junk: np.ndarray | int = 0
) -> list[list[int]]:
    """The drafter's proposals for a batch whose buffers hold junk past each row's end."""
    tokens = np.broadcast_to(np.asarray(junk, np.int32), (len(rows), CAPACITY)).copy()
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    lengths = jnp.asarray([len(row) for row in rows], jnp.int32)
    draft = _propose(
        PromptLookup(lookahead, max_ngram),
        Context(
            tokens=jnp.asarray(tokens),
            lengths=lengths,
            prompt_lengths=jnp.minimum(lengths, 2),
            keys=jax.random.split(jax.random.key(0), len(rows)),
            sampling=BatchSampling.stack([SamplingParams()] * len(rows), 6),
            limits=jnp.full((len(rows),), lookahead, jnp.int32),
        ),
    )
    assert draft.probs is None  # deterministic: q is one-hot
    assert draft.tokens.shape == (len(rows), lookahead)
    assert ((draft.lengths >= 0) & (draft.lengths <= lookahead)).all()
    pairs = zip(np.asarray(draft.tokens), np.asarray(draft.lengths), strict=True)
    return [row[:length].tolist() for row, length in pairs]


@each_setting
@given(rows=st.lists(tokens_of_few_words, min_size=BATCH, max_size=BATCH))
def test_ragged_batches_agree_with_plain_python(lookahead, max_ngram, rows):
    expected = [_look_up(row, lookahead, max_ngram) for row in rows]
    assert _drafts(rows, lookahead, max_ngram) == expected


@each_setting
@given(row=tokens_of_few_words, data=st.data())
def test_tokens_past_the_end_of_a_row_are_never_used(lookahead, max_ngram, row, data):
    # Rows of junk that look like continuations: copies of the row, of its end, and anything.
    repeated = np.resize(row, CAPACITY)
    end = np.resize(row[-max_ngram:], CAPACITY)
    shifted = np.resize(np.roll(row, 1), CAPACITY)
    anything = data.draw(st.lists(st.integers(0, 5), min_size=CAPACITY, max_size=CAPACITY))
    junk = np.stack([repeated, end, shifted, anything])
    expected = _look_up(row, lookahead, max_ngram)
    assert _drafts([row] * BATCH, lookahead, max_ngram, junk) == [expected] * BATCH


@pytest.mark.parametrize(
    ("known", "lookahead", "max_ngram", "expected"),
    [
        pytest.param([1, 2, 3, 9, 2, 5, 1, 2], 2, 2, [3, 9], id="longest n-gram before leftmost"),
        pytest.param([2, 5, 1, 2, 3, 9, 1, 2], 2, 2, [3, 9], id="longest although further right"),
        pytest.param([1, 2, 3, 1, 2, 4, 1, 2], 2, 2, [3, 1], id="leftmost of equal matches"),
        pytest.param([7, 1, 8, 2, 9, 5, 2], 3, 2, [9, 5, 2], id="shorter n-gram if none longer"),
        pytest.param([1, 2, 1], 5, 2, [2, 1], id="cut at the end of what is known"),
        pytest.param([4, 4], 5, 3, [4], id="overlap with the end itself"),
        pytest.param([4, 4, 4, 4, 4], 5, 3, [4, 4], id="a run matches itself, leftmost"),
        pytest.param([1, 2, 3], 4, 3, [], id="nothing matches"),
        pytest.param([5], 4, 3, [], id="one token has no earlier place"),
        pytest.param([0, 0, 1, 0, 2, 3, 1, 0], 1, 3, [2], id="token zero is a token"),
    ],
)
def test_worked_examples(known, lookahead, max_ngram, expected):
    assert _look_up(known, lookahead, max_ngram) == expected
    assert _drafts([known], lookahead, max_ngram, junk=known[-1]) == [expected]


def test_a_row_that_fills_its_buffer_is_looked_up_whole():
    row = [1, 2, 3, *[4] * (CAPACITY - 5), 1, 2]
    assert len(row) == CAPACITY
    assert _drafts([row, row[:-1]], 4, 2) == [[3, 4, 4, 4], [2, 3, 4, 4]]


@pytest.mark.torch
@each_setting
def test_drafts_agree_with_transformers_own_generator(lookahead, max_ngram):
    import torch
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    theirs = PromptLookupCandidateGenerator(
        num_output_tokens=lookahead, max_matching_ngram_size=max_ngram, max_length=10_000
    )
    rng = np.random.default_rng(lookahead * 100 + max_ngram)
    rows = [
        rng.integers(0, rng.choice([2, 4, 12]), rng.integers(1, CAPACITY + 1)).tolist()
        for _ in range(200)
    ]
    expected = []
    for row in rows:
        candidate, _ = theirs.get_candidates(torch.tensor([row]))
        expected.append(candidate[0, len(row) :].tolist())
    assert _drafts(rows, lookahead, max_ngram, junk=1) == expected
    assert sum(map(bool, expected)) > 100  # matches are common
    assert not all(expected)  # and so is their absence


def _look_up_several(known, lookahead: int, max_ngram: int, drafts: int) -> list[list[int]]:
    """The drafts for one row, in plain Python."""
    found: list[list[int]] = []
    length, seen = len(known), set()
    for size in range(min(max_ngram, length - 1), 0, -1):
        for start in range(size, length):
            if start in seen or known[start - size : start] != known[length - size :]:
                continue
            seen.add(start)
            draft = list(known[start : start + lookahead])
            if len(found) < drafts and not any(each[: len(draft)] == draft for each in found):
                found.append(draft)
    return found


@pytest.mark.parametrize("drafts", [1, 2])
def test_the_search_is_skipped_where_no_row_may_draft(drafts):
    tokens = jnp.asarray([[1, 2, 1, 2, 1, 2], [3, 3, 3, 3, 0, 0]], jnp.int32)
    lengths = jnp.asarray([6, 4], jnp.int32)

    def lengths_of(limits, fixed_length=False):
        context = Context(
            tokens=tokens,
            lengths=lengths,
            prompt_lengths=lengths,
            keys=jax.random.split(jax.random.key(0), 2),
            sampling=BatchSampling.stack([SamplingParams()] * 2, 6),
            limits=jnp.asarray(limits, jnp.int32),
            fixed_length=fixed_length,
        )
        return _propose(PromptLookup(3, 2, drafts), context).lengths.tolist()

    assert lengths_of([0, 0]) == [0, 0]
    assert lengths_of([0, 1]) == lengths_of([3, 3]) == lengths_of([0, 0], fixed_length=True)
    assert min(lengths_of([3, 3])) > 0


def _several(rows, lookahead: int, max_ngram: int, drafts: int, junk=0) -> list[list[list[int]]]:
    """The drafter's proposals, each row's drafts apart and without their padding."""
    tokens = np.broadcast_to(np.asarray(junk, np.int32), (len(rows), CAPACITY)).copy()
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    lengths = jnp.asarray([len(row) for row in rows], jnp.int32)
    draft = _propose(
        PromptLookup(lookahead, max_ngram, drafts),
        Context(
            tokens=jnp.asarray(tokens),
            lengths=lengths,
            prompt_lengths=jnp.minimum(lengths, 2),
            keys=jax.random.split(jax.random.key(0), len(rows)),
            sampling=BatchSampling.stack([SamplingParams()] * len(rows), 6),
            limits=jnp.full((len(rows),), lookahead, jnp.int32),
        ),
    )
    assert (draft.probs, draft.num_drafts, draft.lookahead) == (None, drafts, lookahead)
    several = np.asarray(draft.tokens).reshape(len(rows), lookahead, drafts).swapaxes(1, 2)
    sizes = (several >= 0).sum(-1)
    assert (several == np.where(np.arange(lookahead) < sizes[..., None], several, -1)).all()
    assert np.asarray(draft.lengths).tolist() == sizes.max(-1).tolist()
    return [
        [each[:size].tolist() for each, size in zip(row, own, strict=True) if size]
        for row, own in zip(several, sizes, strict=True)
    ]


@pytest.mark.parametrize(
    ("lookahead", "max_ngram", "drafts"), [(1, 1, 3), (3, 2, 2), (4, 9, 3), (30, 3, 4)]
)
@given(rows=st.lists(tokens_of_few_words, min_size=BATCH, max_size=BATCH), junk=st.integers(0, 2))
def test_several_drafts_agree_with_plain_python(lookahead, max_ngram, drafts, rows, junk):
    expected = [_look_up_several(row, lookahead, max_ngram, drafts) for row in rows]
    assert [each[:1] for each in expected] == [
        [draft] if (draft := _look_up(row, lookahead, max_ngram)) else [] for row in rows
    ]
    assert _several(rows, lookahead, max_ngram, drafts, junk) == expected


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        pytest.param([1, 2, 3, 1, 2, 4, 0, 2], [[3, 1], [4, 0]], id="leftmost first"),
        pytest.param([0, 2, 3, 1, 2, 4, 1, 2], [[4, 1], [3, 1]], id="longest first"),
        pytest.param([2, 3, 4, 2, 3, 4, 2, 5, 2], [[3, 4], [5, 2]], id="repetitions are left out"),
        pytest.param([2, 3, 0, 2, 2], [[3, 0], [2]], id="one ends early"),
        pytest.param([4, 4, 4, 4], [[4, 4]], id="the beginning of another is left out"),
        pytest.param([1, 2, 3], [], id="nothing matches"),
    ],
)
def test_worked_examples_of_several_drafts(known, expected):
    assert _look_up_several(known, 2, 2, 3) == expected
    assert _several([known], 2, 2, 3, junk=known[-1]) == [expected]


@pytest.mark.slow
def test_several_drafts_take_fewer_rounds():
    prompts = [[1, 2, 3, 1, 2, 4, 1, 2], [0, 5, 6, 0, 5, 7, 8, 0, 5, 9, 0, 5]]
    requests = [request(prompt, SamplingParams(max_tokens=40)) for prompt in prompts]
    outputs, rounds = [], []
    for drafts in (1, 3):
        drafter = PromptLookup(4, 3, drafts)
        batch = finish(Engine(TARGET, drafter, Constant(4), max_model_len=512).start(requests))
        outputs.append(completions(batch, requests))
        rounds.append(int(batch.state.counters.rounds.sum()))
    assert outputs[0] == outputs[1] and rounds[1] < rounds[0]


def _look_up_predicted(text, prediction, lookahead: int, max_ngram: int) -> list[int]:
    """The draft for one row with a prediction, in plain Python."""
    for size in range(min(max_ngram, len(text)), 0, -1):
        wanted = text[len(text) - size :]
        for part in (prediction, text):  # the prediction's matches of one size come first
            for start in range(len(part) - size):
                if part[start : start + size] == wanted:
                    return list(part[start + size : start + size + lookahead])
    return []


@jax.jit
def _propose_predicted(drafter: PromptLookup, context: Context, predictions):
    state = drafter.init(DrafterPrompt(context.tokens, context.lengths, predictions=predictions))
    return drafter.propose(state, context)[0]


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize(("lookahead", "max_ngram"), [(1, 1), (3, 2), (4, 3), (10, 2)])
@given(
    text=tokens_of_few_words,
    prediction=st.lists(st.integers(0, 3), max_size=12),
    behind=st.integers(0, 3),
    junk=st.integers(0, 3),
)
def test_predictions_agree_with_plain_python(
    lookahead, max_ngram, begins, text, prediction, behind, junk
):
    capacity = CAPACITY + 16
    tokens = np.full((1, capacity), junk, np.int32)
    tokens[0, : len(text)] = text
    end = capacity - behind
    begin = end - len(prediction)
    tokens[0, begin:end] = prediction
    draft = _propose_predicted(
        PromptLookup(lookahead, max_ngram),
        Context(
            tokens=jnp.asarray(tokens),
            lengths=jnp.asarray([len(text)], jnp.int32),
            prompt_lengths=jnp.asarray([len(text) if begins else 0], jnp.int32),
            keys=jax.random.split(jax.random.key(0), 1),
            sampling=BatchSampling.stack([SamplingParams()], 6),
            limits=jnp.full((1,), lookahead, jnp.int32),
        ),
        jnp.asarray([[begin, end]], jnp.int32),
    )
    # A round may have written drafted tokens over what is this close behind the text.
    left = prediction[max(0, len(text) + lookahead + 1 - begin) :]
    expected = _look_up_predicted(text, left, lookahead, max_ngram)
    if begins and left:
        expected = list(left[:lookahead])
    assert draft.tokens[0, : draft.lengths[0]].tolist() == expected


def test_a_prediction_changes_no_text_and_saves_rounds():
    prompts = [[5, 9, 3, 7], [8, 2, 6], [1, 4], [3, 3, 2], [9, 1]]
    engine = Engine(TARGET, PromptLookup(4, 2), Constant(4), max_model_len=512)
    requests = [request(prompt, SamplingParams(max_tokens=40)) for prompt in prompts]
    plain = run(engine, requests)
    predicted = [
        dataclasses.replace(each, prediction=text)
        for each, text in zip(requests, plain, strict=True)
    ]
    batch = finish(engine.start(predicted))
    assert completions(batch, predicted) == plain
    rounds = np.asarray(batch.state.counters.rounds)[: len(prompts)]
    assert (rounds <= 13).all()  # 40 tokens, 5 a round, and some matches are of another place
