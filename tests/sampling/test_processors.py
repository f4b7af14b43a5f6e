"""What stands before a place, drafted tokens included, decides what may stand there."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

from spec_jax.config import SamplingParams
from spec_jax.planning.hlo import collectives
from spec_jax.sampling.parameters import BatchSampling
from spec_jax.sampling.probabilities import probabilities
from spec_jax.sampling.processors import History, process
from spec_jax.sharding import Placement
from spec_jax.testing import reference_probabilities

VOCAB, BATCH, PLACES = 37, 4, 5
FEW = 5
"""Contexts, drafts and bad words are of few distinct tokens, so that words come about."""


@dataclasses.dataclass
class Case:
    """A batch of rows with different contexts, drafts and parameters."""

    params: list[SamplingParams]
    stops: list[list[int]]
    words: list[list[list[int]]]
    logits: np.ndarray
    tokens: np.ndarray
    lengths: np.ndarray
    prompt_lengths: np.ndarray
    following: np.ndarray
    ancestors: np.ndarray | None = None
    allowed: np.ndarray | None = None

    @classmethod
    def random(cls, seed: int, *, masked: bool = False) -> "Case":
        rng = np.random.default_rng(seed)

        def maybe(value, off):
            return value if rng.random() < 0.5 else off

        def word() -> list[int]:
            return rng.integers(0, FEW, int(rng.choice([1, 2, 2, 3, 4]))).tolist()

        lengths = rng.integers(1, 10, BATCH)
        allowed = rng.random((BATCH, PLACES, VOCAB)) < 0.8 if masked else None
        return cls(
            params=[
                SamplingParams(
                    temperature=float(rng.integers(2)),
                    min_tokens=maybe(int(rng.integers(0, 12)), 0),
                    frequency_penalty=maybe(0.75, 0.0),
                    repetition_penalty=maybe(1.5, 1.0),
                    top_k=maybe(9, 0),
                )
                for _ in range(BATCH)
            ],
            stops=[rng.integers(0, VOCAB, int(rng.integers(0, 5))).tolist() for _ in range(BATCH)],
            words=[
                maybe([word() for _ in range(int(rng.integers(1, 5)))], []) for _ in range(BATCH)
            ],
            logits=rng.normal(0, 3, (BATCH, PLACES, VOCAB)).astype(np.float32),
            tokens=rng.integers(0, FEW, (BATCH, 16)),
            lengths=lengths,
            prompt_lengths=rng.integers(0, lengths + 1),
            following=rng.integers(0, FEW, (BATCH, PLACES - 1)),
            allowed=allowed,
        )

    def probs(self, **changes) -> np.ndarray:
        case = dataclasses.replace(self, **changes)
        allowed = None if case.allowed is None else jnp.asarray(pack(case.allowed))
        return np.asarray(
            _run(
                jnp.asarray(case.logits),
                BatchSampling.stack(case.params, VOCAB, case.stops, case.words),
                jnp.asarray(case.tokens, jnp.int32),
                jnp.asarray(case.lengths, jnp.int32),
                jnp.asarray(case.prompt_lengths, jnp.int32),
                jnp.asarray(case.following, jnp.int32),
                None if case.ancestors is None else tuple(map(tuple, case.ancestors.tolist())),
                allowed,
            )
        )

    def path(self, place: int) -> list[int]:
        """Which of the drafted tokens stand before a place."""
        return (
            list(range(place))
            if self.ancestors is None
            else np.flatnonzero(self.ancestors[place]).tolist()
        )

    def context(self, row: int, place: int) -> list[int]:
        known = self.tokens[row, : self.lengths[row]].tolist()
        return known + self.following[row, self.path(place)].tolist()

    def expected(self, row: int, place: int) -> np.ndarray:
        return reference_probabilities(
            self.logits[row, place],
            self.context(row, place),
            int(self.prompt_lengths[row]),
            self.params[row],
            stop_token_ids=self.stops[row],
            bad_words=self.words[row],
            allowed=None
            if self.allowed is None
            else np.flatnonzero(self.allowed[row, place]).tolist(),
        )


def _chosen(logits, sampling, tokens, lengths, prompt_lengths, following, ancestors, allowed):
    history = History.of(tokens, lengths, prompt_lengths, sampling)
    if ancestors is not None:
        ancestors = np.array(ancestors, bool)
    return probabilities(logits, sampling, history, following, ancestors, allowed)


_run = jax.jit(_chosen, static_argnums=6)


def random_tree(rng: np.random.Generator) -> np.ndarray:
    """Every drafted token continues a place before it."""
    ancestors = np.zeros((PLACES, PLACES - 1), bool)
    for i in range(PLACES - 1):
        ancestors[i + 1] = ancestors[int(rng.integers(0, i + 1))]
        ancestors[i + 1, i] = True
    return ancestors


def pack(allowed: np.ndarray) -> np.ndarray:
    padded = np.pad(allowed, [(0, 0)] * (allowed.ndim - 1) + [(0, -allowed.shape[-1] % 32)])
    return np.packbits(padded, axis=-1, bitorder="little").view(np.uint32)


def agree(case: Case, probs: np.ndarray) -> None:
    for row in range(BATCH):
        for place in range(PLACES):
            expected = case.expected(row, place)
            np.testing.assert_allclose(probs[row, place], expected, rtol=2e-5, atol=1e-7)
            assert ((probs[row, place] > 0) == (expected > 0)).all()


@given(st.integers(0, 2**32), st.booleans())
def test_every_place_agrees_with_the_reference(seed, masked):
    case = Case.random(seed, masked=masked)
    agree(case, case.probs())


@pytest.mark.parametrize("seed", range(4))
def test_every_place_of_a_tree_agrees_with_the_reference_along_its_path(seed):
    tree = random_tree(np.random.default_rng(seed))
    for more in range(20):
        case = Case.random(100 * seed + more)
        case.ancestors = tree
        agree(case, case.probs())


def test_a_chain_as_a_tree_is_a_chain():
    case = Case.random(3)
    chain = np.tri(PLACES, PLACES - 1, -1, dtype=bool)
    assert case.probs().tobytes() == case.probs(ancestors=chain).tobytes()


@given(st.integers(0, 2**32))
def test_a_row_is_bit_identical_whatever_its_neighbours_ban(seed):
    case, other = Case.random(seed), Case.random(seed + 1)
    alone = case.probs()
    for stays in range(BATCH):
        mixed = case.probs(
            **{
                name: [getattr(case if i == stays else other, name)[i] for i in range(BATCH)]
                for name in ("params", "stops", "words")
            }
        )
        assert mixed[stays].tobytes() == alone[stays].tobytes()


def test_a_row_that_bans_nothing_passes_bit_for_bit():
    case = Case.random(5)
    case.logits[:, :, :3] = [-0.0, 1e-40, -np.inf]
    case.params = [SamplingParams(temperature=0.7, top_p=0.9)] * BATCH
    off = case.probs(words=[[]] * BATCH)
    busy = [case.params[0], SamplingParams(min_tokens=200, temperature=1.0), *case.params[2:]]
    on = case.probs(params=busy, words=[[], [[1]], [], []])
    everything = np.ones((BATCH, PLACES, VOCAB), bool)
    assert on[[0, 2, 3]].tobytes() == off[[0, 2, 3]].tobytes()
    assert case.probs(words=[[]] * BATCH, allowed=everything).tobytes() == off.tobytes()


@pytest.mark.parametrize("seed", range(5))
def test_a_history_grown_token_by_token_is_that_of_the_longer_row(seed):
    case = Case.random(seed)
    sampling = BatchSampling.stack(case.params, VOCAB, case.stops, case.words)

    def history(grown: int) -> History:
        return History.of(
            jnp.asarray(case.tokens, jnp.int32),
            jnp.asarray(case.lengths + grown, jnp.int32),
            jnp.asarray(case.prompt_lengths, jnp.int32),
            sampling,
        )

    short = history(0)
    for i in range(3):
        drawn = case.tokens[np.arange(BATCH), case.lengths + i]
        short = short.add(jnp.asarray(drawn, jnp.int32))
    long = history(3)
    assert short.recent.tolist() == long.recent.tolist()
    assert short.lengths.tolist() == long.lengths.tolist()
    if sampling.features.history:
        assert short.generated.tolist() == long.generated.tolist()


def only(rows: Sequence[Sequence[int]], **changes) -> np.ndarray:
    """Which tokens are left at each place: [batch, places, vocab]."""
    case = dataclasses.replace(
        Case.random(0),
        params=[SamplingParams(temperature=1.0)] * BATCH,
        words=[[]] * BATCH,
        stops=[[]] * BATCH,
        tokens=np.array([[*row, *[9] * (16 - len(row))] for row in rows]),
        lengths=np.array(list(map(len, rows))),
        prompt_lengths=np.ones(BATCH, int),
    )
    return case.probs(**changes) > 0


def test_a_word_is_banned_at_its_last_token_and_only_after_the_others():
    # Rows end with all of a word's beginning, a part, none, and hold too few tokens.
    left = only(
        [[5, 1, 2], [5, 1], [1, 2, 5], [2]],
        words=[[[1, 2, 3]]] * BATCH,
        following=np.array([[4, 1, 2, 3], [2, 3, 1, 2], [1, 2, 1, 2], [3, 1, 2, 1]]),
    )
    banned = [np.argwhere(~row).tolist() for row in left]
    assert banned == [[[0, 3], [3, 3]], [[1, 3], [4, 3]], [[2, 3], [4, 3]], [[3, 3]]]


def test_a_word_that_would_have_to_begin_before_the_first_token_is_not_banned():
    # As many 1s as stand in row and draft, and no more, whatever lies before the row.
    a, y = 1, 7
    words = [[[a] * before + [y]] for before in (1, 2, 3, 4)]
    for start in range(1, 5):
        left = only([[a] * start] * BATCH, words=words, following=np.full((BATCH, PLACES - 1), a))
        for before, row in enumerate(left, start=1):
            banned = [place for place in range(PLACES) if start + place >= before]
            assert np.argwhere(~row).tolist() == [[place, y] for place in banned]


def test_stop_tokens_are_banned_until_min_tokens_are_generated():
    params = [SamplingParams(temperature=1.0, min_tokens=n) for n in (0, 2, 5, 100)]
    left = only([[7, 1, 2]] * 4, params=params, stops=[[4, 8], [4], [4], [4, 8]])
    # Two tokens of each row are generated.
    assert [(~row[:, 4]).sum() for row in left] == [0, 0, 3, 5]
    assert [(~row[:, 8]).sum() for row in left] == [0, 0, 0, 5]


@pytest.mark.parametrize("dtype", [np.uint32, np.int32])
def test_ids_past_the_end_of_the_mask_are_not_allowed(dtype):
    case = Case.random(0)
    words = np.full((BATCH, PLACES, 1), 0xFFFFFFFF, np.uint32)
    words[1, 2] = 1 << 31 | 1 << 5
    history = History.of(
        jnp.asarray(case.tokens, jnp.int32),
        jnp.asarray(case.lengths, jnp.int32),
        jnp.asarray(case.prompt_lengths, jnp.int32),
        sampling := BatchSampling.stack([SamplingParams(temperature=1.0)] * BATCH, VOCAB),
    )
    following = jnp.asarray(case.following, jnp.int32)
    masks = jnp.asarray(words.view(dtype))
    left = np.asarray(
        probabilities(jnp.asarray(case.logits), sampling, history, following, None, masks)
    )
    assert not left[:, :, 32:].any()
    assert np.flatnonzero(left[1, 2]).tolist() == [5, 31]
    assert (left[0, :, :32] > 0).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_ban_hides_no_nan_and_all_bans_leave_no_distribution(temperature):
    params = [SamplingParams(temperature=temperature, min_tokens=99, max_tokens=99)] * BATCH
    case = dataclasses.replace(Case.random(0), params=params, words=[[]] * BATCH)
    case.logits[0, 0, 3] = np.nan
    case.stops = [[3], list(range(VOCAB)), [], []]
    probs = case.probs()
    assert not probs[0, 0].any() and not probs[1].any()
    np.testing.assert_allclose(probs[0, 1:].sum(-1), 1, rtol=1e-5)
    np.testing.assert_allclose(probs[2:].sum(-1), 1, rtol=1e-5)


def test_sizes_are_rounded_so_that_few_programs_are_compiled():
    def shapes(stops, words):
        sampling = BatchSampling.stack([SamplingParams()] * 3, VOCAB, stops, words)
        return sampling.stop_token_ids.shape[1], *sampling.bad_words.shape[1:]

    assert shapes([], []) == shapes([[1]], [[[1, 2, 3, 4]] * 64]) == (8, 64, 8)
    assert shapes([[1] * 9], [[], [[1]] * 65]) == (64, 512, 8)
    assert shapes([[1] * 8], [[[1] * 65]]) == (8, 64, 512)


@pytest.mark.parametrize(("data", "model"), [(1, 8), (2, 4)])
def test_a_sharded_vocabulary_is_processed_without_communication(data, model):
    mesh = jax.make_mesh((data, model), ("data", "model"), (AxisType.Auto,) * 2)
    placement = Placement(mesh, (("batch", ("data",)), ("vocab", ("model",))))
    batch, vocab = 2, 8 * 12  # no device's part ends where a word of the mask does
    params = [SamplingParams(min_tokens=9, frequency_penalty=1.0)] * batch
    sampling = BatchSampling.stack(
        params, vocab, [[1, 2]] * batch, [[[1, 2, 3]]] * batch, placement=placement
    )
    counts = jnp.zeros((batch, vocab), jnp.int32)
    recent = jnp.zeros((batch, sampling.bad_words.shape[2] - 1), jnp.int32)
    history = History(counts, counts, jnp.zeros((batch,), jnp.int32), recent)
    rows = sampling, history, jnp.zeros((batch, 4), jnp.int32)
    allowed = jnp.zeros((batch, 5, 3), jnp.uint32)
    along = placement.sharding("batch", None, "vocab")
    placed = jax.tree.map(lambda leaf: placement.sharding("batch"), (rows, allowed))
    jitted = jax.jit(
        lambda logits, rows, allowed: process(logits, *rows, allowed=allowed),
        in_shardings=(along, *placed),
        out_shardings=along,
    )
    text = jitted.lower(jnp.zeros((batch, 5, vocab)), rows, allowed).compile().as_text()
    assert not collectives(text)
    loops = [line for line in text.splitlines() if " while(" in line]
    assert all(f",{vocab}]" not in loop for loop in loops)
    assert sum(f"pred[{batch // data},5,{vocab // model}]" in loop for loop in loops) == 1
    assert len(loops) == 1 + placement.skips_unused  # a bias that some row may have
