"""One function turns logits into probabilities; these are the promises its docstring makes."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from spec_jax.config import SamplingParams
from spec_jax.sampling import probabilities as module
from spec_jax.sampling.parameters import BatchSampling, SamplingFeatures
from spec_jax.sampling.probabilities import _keep_top, probabilities
from spec_jax.sampling.processors import History

VOCAB = 37
EVERY_FEATURE = SamplingFeatures(True, True, True)


@pytest.fixture(
    scope="module", autouse=True, params=["XLA", pytest.param("native", marks=pytest.mark.native)]
)
def code(request):
    """What computes the distributions: on a CPU native code, elsewhere and in float64 XLA's."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "XLA":
            patch.setattr(module, "_is_native", lambda *_: False)
        _run.clear_cache()
        yield request.param
    _run.clear_cache()


@jax.jit
def _run(logits, sampling, tokens, lengths, prompt_lengths, following):
    history = History.of(tokens, lengths, prompt_lengths, sampling)
    return probabilities(logits, sampling, history, following)


def _probs(
    logits: np.ndarray,
    params: Sequence[SamplingParams],
    *,
    tokens: np.ndarray | None = None,
    lengths: Sequence[int] | None = None,
    prompt_lengths: Sequence[int] | None = None,
    following: np.ndarray | None = None,
    features: SamplingFeatures = SamplingFeatures(),  # noqa: B008 - it is frozen
) -> np.ndarray:
    """Jitted `probabilities` of logits [batch, places, vocab], in the logits' precision."""
    batch, places, vocab = logits.shape
    tokens = np.zeros((batch, 1), np.int32) if tokens is None else tokens
    lengths = [0] * batch if lengths is None else lengths
    prompt_lengths = lengths if prompt_lengths is None else prompt_lengths
    following = np.zeros((batch, places - 1), np.int32) if following is None else following
    sampling = BatchSampling.stack(params, vocab, features=features)
    if logits.dtype == np.float64:
        sampling = jax.tree.map(
            lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x, sampling
        )
    return np.asarray(
        _run(
            jnp.asarray(logits),
            sampling,
            jnp.asarray(tokens, jnp.int32),
            jnp.asarray(lengths, jnp.int32),
            jnp.asarray(prompt_lengths, jnp.int32),
            jnp.asarray(following, jnp.int32),
        )
    )


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _reference(logits, params, prompt, generated) -> np.ndarray:
    """The whole chain for one place, written with loops and a sort, in float64."""
    x = np.asarray(logits, np.float64).copy()
    for token, bias in params.logit_bias.items():
        x[token] += bias
    for token in {*prompt, *generated}:
        factor = params.repetition_penalty
        x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
    for token in set(generated):
        x[token] -= params.presence_penalty + params.frequency_penalty * generated.count(token)
    if params.temperature == 0:
        return np.eye(x.size)[np.argmax(x)]
    x /= params.temperature
    if params.top_k:
        x[x < np.sort(x)[::-1][min(params.top_k, x.size) - 1]] = -np.inf
    if params.top_p < 1:
        p = _softmax(x)
        x[[p[x > value].sum() >= params.top_p for value in x]] = -np.inf
    p = _softmax(x)
    x[p < params.min_p * p.max()] = -np.inf
    return _softmax(x)


def _random_params(rng: np.random.Generator) -> SamplingParams:
    """Every parameter is off in about half of the draws."""

    def maybe(value, off):
        return value if rng.random() < 0.5 else off

    return SamplingParams(
        temperature=maybe(float(rng.uniform(0.3, 2)), float(rng.integers(2))),
        top_k=maybe(int(rng.integers(1, VOCAB + 5)), 0),
        top_p=maybe(float(rng.uniform(0.05, 1)), 1.0),
        min_p=maybe(float(rng.uniform(0, 0.5)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2)), 1.0),
        presence_penalty=maybe(float(rng.uniform(-1, 1)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-1, 1)), 0.0),
        logit_bias={
            int(t): float(rng.choice([-np.inf, -1.5, 2.0]))
            for t in rng.choice(VOCAB, int(rng.integers(0, 4)), replace=False)
        },
    )


@dataclasses.dataclass
class Case:
    """A batch of rows with different contexts, drafts and parameters."""

    params: list[SamplingParams]
    logits: np.ndarray
    tokens: np.ndarray
    lengths: np.ndarray
    prompt_lengths: np.ndarray
    following: np.ndarray
    features: SamplingFeatures = dataclasses.field(default_factory=SamplingFeatures)

    @classmethod
    def random(cls, seed: int, *, batch: int = 5, places: int = 4) -> "Case":
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, 13, batch)
        return cls(
            params=[_random_params(rng) for _ in range(batch)],
            logits=rng.normal(0, 3, (batch, places, VOCAB)).astype(np.float32),
            # Few distinct tokens, so that contexts and drafts repeat themselves.
            tokens=rng.integers(0, 9, (batch, 16)),
            lengths=lengths,
            prompt_lengths=rng.integers(0, lengths + 1),
            following=rng.integers(0, 9, (batch, places - 1)),
        )

    def probs(self, **changes) -> np.ndarray:
        case = dataclasses.replace(self, **changes)
        return _probs(
            case.logits,
            case.params,
            tokens=case.tokens,
            lengths=case.lengths,
            prompt_lengths=case.prompt_lengths,
            following=case.following,
            features=case.features,
        )

    def context(self, row: int, place: int) -> tuple[list[int], list[int]]:
        known = self.tokens[row, : self.lengths[row]].tolist()
        split = self.prompt_lengths[row]
        return known[:split], known[split:] + self.following[row, :place].tolist()


@given(st.integers(0, 2**32))
def test_a_row_is_bit_identical_whatever_its_neighbours_are(seed):
    case, other = Case.random(seed), Case.random(seed + 1)
    alone = case.probs()
    for stays in range(5):
        is_kept = np.arange(5) == stays
        mixed = {
            name: np.where(
                is_kept.reshape(-1, *[1] * (getattr(case, name).ndim - 1)),
                getattr(case, name),
                getattr(other, name),
            )
            for name in ("logits", "tokens", "lengths", "prompt_lengths", "following")
        }
        mixed["logits"][(stays + 1) % 5] = np.nan
        params = [case.params[i] if i == stays else other.params[i] for i in range(5)]
        assert case.probs(params=params, **mixed)[stays].tobytes() == alone[stays].tobytes()
        plain = [case.params[i] if i == stays else SamplingParams() for i in range(5)]
        assert case.probs(params=plain)[stays].tobytes() == alone[stays].tobytes()


def test_a_row_is_bit_identical_in_every_slot():
    case = Case.random(5)
    order = np.array([3, 0, 4, 1, 2])
    moved = case.probs(
        params=[case.params[i] for i in order],
        **{
            name: getattr(case, name)[order]
            for name in ("logits", "tokens", "lengths", "prompt_lengths", "following")
        },
    )
    assert moved.tobytes() == case.probs()[order].tobytes()


def test_parameters_that_are_off_are_exact_identities():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 4, (2, 1, VOCAB)).astype(np.float32)
    logits[:, :, 3] = -np.inf
    off = SamplingParams(temperature=0.8)
    penalties = {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 1.0}
    every_step = dataclasses.replace(off, top_k=3, top_p=0.5, min_p=0.1, **penalties)
    tokens = np.arange(VOCAB)[None].repeat(2, 0)
    history = {"tokens": tokens, "lengths": [20, 20], "prompt_lengths": [5, 5]}
    steps_skipped = _probs(logits, [off, off], **history)[0]
    steps_taken = _probs(logits, [off, every_step], **history)[0]
    assert steps_taken.tobytes() == steps_skipped.tobytes()
    assert (steps_taken[0] > 0).sum() == VOCAB - 1
    np.testing.assert_allclose(
        steps_taken, _softmax(logits[0].astype(np.float64) / np.float32(0.8)), rtol=1e-5
    )


def test_features_are_what_any_row_needs():
    def features(*rows, **words):
        return BatchSampling.stack(rows, VOCAB, **words).features

    greedy = SamplingParams(top_k=5, top_p=0.5, min_p=0.1, logit_bias={3: 1.0})
    assert features(greedy, SamplingParams()) == SamplingFeatures()
    random = SamplingParams(temperature=0.7)
    assert features(greedy, random) == SamplingFeatures(random=True)
    needs = {
        "cut": [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}],
        "history": [
            {"repetition_penalty": 1.1},
            {"presence_penalty": -1.0},
            {"frequency_penalty": 0.1},
            {"min_tokens": 1},
        ],
    }
    for name, options in needs.items():
        for option in options:
            alone = features(random, SamplingParams(temperature=1.0, **option))
            assert alone == SamplingFeatures(random=True, **{name: True})
    assert features(greedy, bad_words=[[[1]]]) == SamplingFeatures(history=True)
    assert features(greedy, bad_words=[[]]) == SamplingFeatures()
    more = BatchSampling.stack([random], VOCAB, features=SamplingFeatures(cut=True))
    assert more.features == SamplingFeatures(random=True, cut=True)


@given(st.integers(0, 2**32))
def test_a_program_with_more_features_is_bit_identical(seed):
    case = Case.random(seed)
    for name, off in (("top_k", 0), ("top_p", 1.0), ("temperature", 0.0)):
        params = [dataclasses.replace(each, **{name: off}) for each in case.params]
        assert (
            case.probs(params=params, features=EVERY_FEATURE).tobytes()
            == case.probs(params=params).tobytes()
        )


@pytest.mark.parametrize("features", [SamplingFeatures(), SamplingFeatures(random=True)])
def test_steps_that_no_row_needs_are_no_part_of_the_program(features, code):
    """A cut is a separate condition, which one device decides (a mesh: `test_sharded_rows`)."""

    def text(features):
        sampling = BatchSampling.stack([SamplingParams()] * 2, VOCAB, features=features)
        rows = jnp.zeros((2, 1), jnp.int32)
        one = jnp.ones((2,), jnp.int32)
        args = jnp.zeros((2, 1, VOCAB)), sampling, rows, one, one, rows[:, :0]
        return _run.lower(*args).as_text()

    assert text(EVERY_FEATURE).count("stablehlo.case") == (3 if code == "XLA" else 0)
    assert "stablehlo.case" not in text(features)
    assert text(features).count("stablehlo.while") == 1  # a bias that some row may have


@pytest.mark.parametrize("top_k", [VOCAB, VOCAB + 1, 2**31, 2**70])
def test_a_top_k_of_the_vocabulary_or_more_keeps_every_token(top_k):
    logits = np.random.default_rng(1).normal(0, 4, (1, 1, VOCAB)).astype(np.float32)
    wide = _probs(logits, [SamplingParams(temperature=1.0, top_k=top_k)])
    assert wide.tobytes() == _probs(logits, [SamplingParams(temperature=1.0)]).tobytes()


@pytest.mark.parametrize(
    ("name", "value"), [("top_k", 1), ("min_p", 1.0), *[("top_p", 10.0**-n) for n in (6, 40, 60)]]
)
def test_the_narrowest_cut_keeps_the_likeliest_token(name, value):
    logits = np.array([[[1.0, 3.0, 2.0]]], np.float32)
    probs = _probs(logits, [SamplingParams(temperature=1.0, **{name: value})])
    assert probs.tolist() == [[[0.0, 1.0, 0.0]]]


@given(st.integers(0, 2**32))
def test_temperature_zero_is_one_hot_at_the_penalised_argmax(seed):
    case = Case.random(seed)
    case.params = [dataclasses.replace(each, temperature=0.0) for each in case.params]
    case.params[0] = dataclasses.replace(case.params[0], temperature=1.0)
    for probs in (case.probs(), case.probs(params=[case.params[1], *case.params[1:]])):
        for row in range(1, 5):
            for place in range(4):
                prompt, generated = case.context(row, place)
                expected = _reference(case.logits[row, place], case.params[row], prompt, generated)
                assert probs[row, place].tolist() == expected.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tied_logits_are_argmax_first_when_greedy_and_share_when_not(temperature):
    logits = np.array([[[1.0, 5.0, 5.0, 5.0, 2.0]]], np.float32)
    probs = _probs(logits, [SamplingParams(temperature=temperature, top_k=2)])[0, 0]
    expected = [0, 1, 0, 0, 0] if temperature == 0 else [0, 1 / 3, 1 / 3, 1 / 3, 0]
    np.testing.assert_allclose(probs, expected, rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_exactly_the_places_without_a_distribution_are_zeros(temperature):
    # The places of one row, each with its verdict; the second row is banned token by token.
    nothing = np.full(VOCAB, -np.inf)
    places = {
        "plain": (np.zeros(VOCAB), True),
        "one token left": (np.where(np.arange(VOCAB) == 4, -1e30, -np.inf), True),
        "one NaN": (np.where(np.arange(VOCAB) == 7, np.nan, 0.0), False),
        "NaN among masked": (np.where(np.arange(VOCAB) == 7, np.nan, -np.inf), False),
        "all masked": (nothing, False),
        "huge": (np.where(np.arange(VOCAB) == 2, 3e38, -3e38), True),
    }
    logits = np.stack([logits for logits, _ in places.values()])[None].repeat(3, 0)
    every_step = {"top_k": 5, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1}
    probs = _probs(
        logits.astype(np.float32),
        [
            SamplingParams(temperature=temperature),
            SamplingParams(temperature=temperature, **every_step),
            SamplingParams(logit_bias=dict.fromkeys(range(VOCAB), -np.inf)),
        ],
        tokens=np.full((3, 1), VOCAB - 1),
        lengths=[1, 1, 1],
        following=np.full((3, len(places) - 1), VOCAB - 1),
    )
    for i, (name, (_, valid)) in enumerate(places.items()):
        for row in (0, 1):
            if valid:
                assert probs[row, i].sum() == pytest.approx(1, abs=1e-6), name
            else:
                assert (probs[row, i] == 0).all(), name
    assert (probs[2] == 0).all()


@pytest.mark.parametrize("temperature", [1.2e-38, 5e-38, 1e-37, 1e-30, 1e-20])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0, 1e30])
def test_the_smallest_temperatures_are_the_limit_of_small_ones(temperature, scale):
    """The best tokens share; whether the best logit is positive, zero or negative."""
    near = np.array([-1.0, 3.0, 3.0, 2.0, -np.inf], np.float32)
    logits = np.stack([near, near - 3, near - 9])[None] * np.float32(scale)
    every_step = {"top_k": 4, "top_p": 0.9, "min_p": 0.01}
    params = [
        SamplingParams(temperature=temperature),
        SamplingParams(temperature=temperature, **every_step),
    ]
    probs = _probs(np.repeat(logits, 2, 0), params)
    assert probs.tolist() == np.broadcast_to([0, 0.5, 0.5, 0, 0], probs.shape).tolist()


@pytest.mark.parametrize("temperature", [1e-38, 1e-45, 1e-300, 5e-324])
def test_a_temperature_that_float32_does_not_hold_is_greedy(temperature):
    sampling = BatchSampling.stack([SamplingParams(temperature=temperature)], VOCAB)
    assert sampling.temperature.tolist() == [0.0]


@given(st.integers(0, 2**32))
def test_a_place_counts_the_tokens_that_follow_as_an_extended_context_would(seed):
    case = Case.random(seed)
    together = case.probs()
    for place in range(4):
        tokens = np.zeros((5, 16), np.int64)
        for row in range(5):
            prompt, generated = case.context(row, place)
            tokens[row] = np.resize(prompt + generated, 16)
        apart = case.probs(
            logits=case.logits[:, place : place + 1],
            tokens=tokens,
            lengths=case.lengths + place,
            following=np.zeros((5, 0), np.int32),
        )
        np.testing.assert_allclose(together[:, place], apart[:, 0], rtol=1e-6, atol=0)


def test_the_following_tokens_change_later_places_and_only_those():
    case = Case.random(3)
    case.params = [SamplingParams(temperature=1.0, frequency_penalty=1.0)] * 5
    changed = case.following.copy()
    changed[:, 1] = (changed[:, 1] + 1) % 9
    before, after = case.probs(), case.probs(following=changed)
    assert before[:, :2].tobytes() == after[:, :2].tobytes()
    assert (before[:, 2:] != after[:, 2:]).any(-1).all()


def test_counts_know_prompt_from_output_and_ignore_what_lies_past_the_end():
    sampling = BatchSampling.stack([SamplingParams(frequency_penalty=1.0)] * 2, 5)
    tokens = jnp.asarray([[1, 1, 2, 1, 4, 4], [0, 3, 3, 3, 3, 3]], jnp.int32)
    lengths, prompts = jnp.asarray([4, 1], jnp.int32), jnp.asarray([2, 1], jnp.int32)
    counts = History.of(tokens, lengths, prompts, sampling)
    assert counts.prompt.tolist() == [[0, 2, 0, 0, 0], [1, 0, 0, 0, 0]]
    assert counts.generated.tolist() == [[0, 1, 1, 0, 0], [0, 0, 0, 0, 0]]
    more = counts.add(jnp.asarray([1, 0], jnp.int32))
    assert more.prompt.tolist() == counts.prompt.tolist()
    assert more.generated.tolist() == [[0, 2, 1, 0, 0], [1, 0, 0, 0, 0]]


@given(st.integers(0, 2**32))
def test_float64_agrees_with_a_sort_based_reference_to_the_last_digits(seed):
    case = Case.random(seed)
    # The parameters are stored as float32; the reference must use the same numbers.
    names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")
    case.params = [
        dataclasses.replace(
            each,
            **{n: float(np.float32(getattr(each, n))) for n in (*names, "frequency_penalty")},
        )
        for each in case.params
    ]
    with jax.enable_x64(True):
        probs = case.probs(logits=case.logits.astype(np.float64))
    assert probs.dtype == np.float64
    for row in range(5):
        for place in range(4):
            expected = _reference(
                case.logits[row, place], case.params[row], *case.context(row, place)
            )
            np.testing.assert_allclose(probs[row, place], expected, rtol=1e-12, atol=1e-15)


# The cut that replaces a sort.
EDGES = [-np.inf, -3.4e38, -1.5, -1e-30, -1e-40, -0.0, 0.0, 1e-40, 1e-30, 1.0, 1.5, 3.4e38]


def _keep_top_by_sorting(logits, weights, limit) -> np.ndarray:
    """Boolean [batch, places, vocab]: is the weight strictly above each token below the limit?"""
    keep = np.zeros(logits.shape, bool)
    for row, place in np.ndindex(logits.shape[:2]):
        x, w = logits[row, place], weights[row, place]
        order = np.argsort(-x, kind="stable")
        above = np.concatenate([[0.0], np.cumsum(w[order])])
        first = {}
        for rank, value in enumerate(x[order].tolist()):
            first.setdefault(value, above[rank])
        keep[row, place] = [first[value] < limit[row] for value in x.tolist()]
    return keep


def _check_keep_top(logits, weights, limit) -> None:
    arrays = map(jnp.asarray, (logits, weights, limit[:, None, None]))
    found = np.asarray(jax.jit(_keep_top)(*arrays))
    # XLA may or may not treat denormals as zeros.
    tiny = np.finfo(logits.dtype).tiny
    flushed = np.where(np.abs(logits) < tiny, 0.0, logits).astype(logits.dtype)
    kept = [_keep_top_by_sorting(x, weights, limit) for x in (logits, flushed)]
    answers = [np.where(each, flushed, -np.inf).tolist() for each in kept]
    assert np.where(np.abs(found) < tiny, 0.0, found).tolist() in answers


@given(
    hnp.arrays(np.float32, (3, 2, 7), elements=st.sampled_from(EDGES)),
    hnp.arrays(np.int32, 3, elements=st.integers(1, 7)),
)
def test_the_bisected_top_k_equals_a_sort_with_ties_infinities_and_zeros(logits, k):
    _check_keep_top(logits, np.ones_like(logits), k.astype(np.float32))


@given(
    hnp.arrays(np.float32, (3, 2, 7), elements=st.sampled_from(EDGES)),
    hnp.arrays(np.int32, (3, 2, 7), elements=st.integers(0, 64)),
    hnp.arrays(np.int32, 3, elements=st.integers(1, 256)),
)
def test_the_bisected_top_p_equals_a_sort(logits, weights, limit):
    # Multiples of 1/256, whose sums are exact in any order.
    _check_keep_top(logits, (weights / 256).astype(np.float32), (limit / 256).astype(np.float32))


@given(st.data())
def test_the_bisected_cut_is_exact_to_the_last_bit_of_any_float(data):
    any_float = st.floats(width=32, allow_nan=False, allow_subnormal=False)
    logits = data.draw(hnp.arrays(np.float32, (1, 1, 5), elements=any_float))
    with np.errstate(over="ignore"):  # past the largest float
        near = np.nextafter(logits, np.float32(np.inf), dtype=np.float32)
    both = np.concatenate([logits, np.where(np.isfinite(near), near, logits)], -1)
    for k in (1, 4, 9):
        _check_keep_top(both, np.ones_like(both), np.full(1, k, np.float32))


def test_the_bisected_cut_works_in_float64():
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 1e3, (2, 1, 50))
    logits[0, 0, :3] = [1e300, -1e300, np.nextafter(1e300, np.inf)]
    with jax.enable_x64(True):
        for k in (1.0, 2.0, 49.0):
            _check_keep_top(logits, np.ones_like(logits), np.array([k, 3.0]))
