"""`probabilities` against Hugging Face transformers' own processors, on 500 random cases."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.config import SamplingParams
from spec_jax.sampling.parameters import BatchSampling
from spec_jax.sampling.probabilities import probabilities
from spec_jax.sampling.processors import History

pytestmark = pytest.mark.torch

ROWS = 50
VOCABS = (5, 8, 13, 31, 64, 100, 256, 500, 1000, 2000)
MARGIN = 1e-6  # how near a cut may be to a token before float32 may decide either way
UNDERFLOW = 1e-37  # XLA flushes what is smaller to zero, PyTorch does not


def _random_words(rng: np.random.Generator, vocab: int) -> list[list[int]]:
    """No bad words, or a few of few distinct tokens."""
    if rng.random() < 0.5:
        return []
    sizes = rng.choice([1, 2, 2, 3], int(rng.integers(1, 5)))
    return [rng.integers(0, min(vocab, 6), size).tolist() for size in sizes]


def _random_params(rng: np.random.Generator, vocab: int) -> SamplingParams:
    """Each parameter is off in half of the cases; temperatures and cuts go to extremes."""

    def maybe(value, off):
        return value if rng.random() < 0.5 else off

    def f32(value) -> float:
        return float(np.float32(value))  # what both sides then compute with

    biased = rng.choice(vocab, min(vocab - 1, int(rng.integers(1, 6))), replace=False)
    return SamplingParams(
        min_tokens=maybe(int(rng.integers(0, 30)), 0),
        temperature=f32(maybe(rng.choice([0.02, 0.3, 0.7, 1.5, 5.0, 100.0]), 1.0)),
        top_k=maybe(int(rng.integers(1, vocab + 10)), 0),
        top_p=f32(maybe(rng.choice([rng.uniform(0.001, 1), 0.9, 0.999]), 1.0)),
        min_p=f32(maybe(rng.choice([rng.uniform(0, 1), 0.01]), 0.0)),
        repetition_penalty=f32(maybe(rng.uniform(0.3, 3), 1.0)),
        presence_penalty=f32(maybe(rng.uniform(-2, 2), 0.0)),
        # Exact when multiplied: XLA fuses the product and the difference into one rounding, which
        # temperature 0.02 makes 50 times as large.
        frequency_penalty=maybe(int(rng.integers(-64, 65)) / 64, 0.0),
        logit_bias=maybe(
            {int(t): f32(rng.choice([-np.inf, rng.normal(0, 3), -100.0, 5.0])) for t in biased}, {}
        ),
    )


def _additive_penalties(scores, params, generated):
    """Presence and frequency as the OpenAI API defines them; transformers has neither."""
    out = scores.clone()
    for token in set(generated):
        out[0, token] -= params.presence_penalty
        out[0, token] -= params.frequency_penalty * generated.count(token)
    return out


def _hugging_face(logits, params, context, generated, words, stops):
    """Final probabilities, and whether some token stands too near a cut to compare the support.

    The processors are called in the order of `GenerationMixin._get_logits_processor`.
    """
    import torch
    from transformers.generation import logits_process as hf

    ids = torch.tensor([context], dtype=torch.long)
    scores = torch.tensor(np.asarray(logits))[None]
    if params.logit_bias:
        bias = {(token,): value for token, value in params.logit_bias.items()}
        scores = hf.SequenceBiasLogitsProcessor(bias)(ids, scores)
    if params.repetition_penalty != 1:
        scores = hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    scores = _additive_penalties(scores, params, generated)
    if words:
        scores = hf.NoBadWordsLogitsProcessor(words)(ids, scores)
    if params.min_tokens:
        prompt = len(context) - len(generated)
        scores = hf.MinNewTokensLengthLogitsProcessor(prompt, params.min_tokens, stops)(ids, scores)
    if params.temperature != 1:
        scores = hf.TemperatureLogitsWarper(params.temperature)(ids, scores)
    if params.top_k:
        scores = hf.TopKLogitsWarper(params.top_k)(ids, scores)
    near = False
    if params.top_p < 1:
        sorted_probs = scores.double().softmax(-1).sort(descending=True).values
        above = sorted_probs.cumsum(-1) - sorted_probs
        near |= bool(((above - params.top_p).abs() < MARGIN).any())
        scores = hf.TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p > 0:
        probs = scores.double().softmax(-1)
        floor = params.min_p * probs.max()
        near |= bool(((probs - floor).abs() < MARGIN * floor).any())
        scores = hf.MinPLogitsWarper(params.min_p)(ids, scores)
    return scores.softmax(-1)[0].numpy(), near


@jax.jit
def _ours(logits, sampling, tokens, lengths, prompt_lengths, following):
    history = History.of(tokens, lengths, prompt_lengths, sampling)
    return probabilities(logits, sampling, history, following)


@functools.cache
def _compared(vocab: int, ties: bool = False):
    """Rows of different parameters in one batch, two places each: (ours, theirs, near)."""
    rng = np.random.default_rng(vocab)
    params = [_random_params(rng, vocab) for _ in range(ROWS)]
    scale = rng.choice([0.1, 1.0, 5.0, 30.0], (ROWS, 1, 1))
    logits = (rng.normal(0, 1, (ROWS, 2, vocab)) * scale).astype(np.float32)
    if ties:
        # Ties at a cut are all kept by top-k and min-p; at top-p the two libraries differ.
        logits = np.round(logits / scale * 2).astype(np.float32)
        params = [
            SamplingParams(temperature=p.temperature, top_k=p.top_k, min_p=p.min_p) for p in params
        ]
    words = [[] if ties else _random_words(rng, vocab) for _ in range(ROWS)]
    # Not every token that is left may be banned.
    stops = [rng.choice(vocab, min(vocab, 2), replace=False).tolist() for _ in range(ROWS)]
    lengths = rng.integers(1, 30, ROWS)
    prompt_lengths = rng.integers(0, lengths + 1)
    # Words from a small part of the vocabulary, so that contexts repeat themselves.
    tokens = rng.integers(0, min(vocab, 20), (ROWS, 32))
    following = rng.integers(0, min(vocab, 20), (ROWS, 1))
    ours = _ours(
        jnp.asarray(logits),
        BatchSampling.stack(params, vocab, stops, words),
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray(lengths, jnp.int32),
        jnp.asarray(prompt_lengths, jnp.int32),
        jnp.asarray(following, jnp.int32),
    )
    theirs = np.zeros_like(logits)
    near = np.zeros((ROWS, 2), bool)
    for row, place in np.ndindex(ROWS, 2):
        context = [*tokens[row, : lengths[row]].tolist(), *following[row, :place].tolist()]
        generated = context[prompt_lengths[row] :]
        theirs[row, place], near[row, place] = _hugging_face(
            logits[row, place], params[row], context, generated, words[row], stops[row]
        )
    return np.asarray(ours), theirs, near, params


def _assert_same_support(ours, theirs, message=""):
    assert not ours[theirs == 0].any(), message
    assert ours[theirs > UNDERFLOW].all(), message


@pytest.mark.parametrize("vocab", VOCABS)
def test_probabilities_agree_with_hugging_face_to_1e_5(vocab):
    ours, theirs, near, params = _compared(vocab)
    assert np.isfinite(theirs).all()
    for row, place in zip(*np.nonzero(~near), strict=True):
        np.testing.assert_allclose(
            ours[row, place], theirs[row, place], rtol=0, atol=1e-5, err_msg=repr(params[row])
        )


@pytest.mark.parametrize("vocab", VOCABS)
def test_the_support_agrees_with_hugging_face_exactly(vocab):
    ours, theirs, near, params = _compared(vocab)
    for row, place in zip(*np.nonzero(~near), strict=True):
        _assert_same_support(ours[row, place], theirs[row, place], repr(params[row]))


def test_hardly_any_case_is_excused_for_standing_at_a_cut():
    near = np.concatenate([_compared(vocab)[2] for vocab in VOCABS])
    assert near.size == 1000
    assert near.sum() <= 10


@pytest.mark.parametrize("vocab", (5, 64))
def test_tokens_tied_at_a_cut_are_kept_or_dropped_together_as_by_hugging_face(vocab):
    ours, theirs, _, params = _compared(vocab, ties=True)
    _assert_same_support(ours, theirs)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    # The case exists: somewhere more tokens than top_k were kept.
    kept = (ours > 0).sum(-1)
    assert any((kept[i] > p.top_k).any() for i, p in enumerate(params) if p.top_k)


def test_the_order_of_the_processors_is_the_one_that_transformers_uses():
    from transformers import GenerationConfig, GenerationMixin, LlamaConfig

    model = GenerationMixin()
    model.config = LlamaConfig()
    config = GenerationConfig(
        do_sample=True,
        sequence_bias=[[[1], 2.0]],
        repetition_penalty=1.5,
        bad_words_ids=[[1, 2]],
        min_new_tokens=2,
        eos_token_id=[3],
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
    )
    model._prepare_special_tokens(config, False, device="cpu")
    processors = model._get_logits_processor(
        config,
        input_ids_seq_length=4,
        prefix_allowed_tokens_fn=lambda row, context: [0],
        device="cpu",
    )
    assert [type(each).__name__ for each in processors] == [
        "SequenceBiasLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "PrefixConstrainedLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
    ]
